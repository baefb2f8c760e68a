"""Several optimizers on one task over learning rates and seeds, for the command `dash-shampoo compare`."""
