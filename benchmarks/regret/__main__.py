"""`python -m benchmarks.regret`."""

from benchmarks.regret.evaluate import main

if __name__ == "__main__":
    main()
