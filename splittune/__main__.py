"""`python -m splittune`: the command line, also where its script is not on the path."""

from splittune.cli import main

if __name__ == "__main__":
    main()
