"""`python -m benchmarks.peers`."""

from benchmarks.peers.workloads import main

if __name__ == "__main__":
    main()
