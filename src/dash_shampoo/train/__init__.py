"""Training Llama-type models on text, for the command `dash-shampoo train`."""
