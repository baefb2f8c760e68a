"""Many processes: who owns which tile, what each holds of a parameter, and the exchange between them."""
