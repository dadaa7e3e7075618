"""``python -m meshwright``: the command."""

from meshwright.cli.main import main

main()
