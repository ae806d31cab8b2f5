"""`python -m localllm`."""

from localllm.cli.main import main

if __name__ == "__main__":
    main()
