"""`python -m benchmarks.wrapper`."""

from benchmarks.wrapper.virtual import main

if __name__ == "__main__":
    main()
