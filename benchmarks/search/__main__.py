"""`python -m benchmarks.search`."""

from benchmarks.search.judge import main

if __name__ == "__main__":
    main()
