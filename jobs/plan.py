"""Prints the actor graph of a run and whether the cluster can hold it; takes the options of jobs/train.py."""

import sys

from train import main

if __name__ == "__main__":
    sys.exit(main(["--plan", *sys.argv[1:]]))
