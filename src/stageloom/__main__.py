"""`python -m stageloom`."""

from stageloom.cli import main

if __name__ == "__main__":
    main()
