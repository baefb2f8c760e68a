"""``python -m dash_shampoo`` is the command `dash-shampoo`: what torchrun starts."""

from dash_shampoo.cli import main

if __name__ == "__main__":
    main()
