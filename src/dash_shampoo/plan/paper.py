"""What the paper measured, to stand beside an estimate of the same step (arXiv 2602.02016)."""

from __future__ import annotations

from rich.console import Console

# Model, processes and GPU of its measurements, and milliseconds of an optimizer step with blocks of 1024 and p = 4. Its
# products in "FP32" are in TF32.
SETTING = ("llama-953m", 8, "h100")
MILLISECONDS = {
    "Distributed Shampoo, coupled Newton": "666",
    "eigendecomposition": "2850",
    "eigendecomposition every 10 steps": "313",
    "Newton-DB": "174 to 177",
    "coupled Newton in FP16": "119",
}


def show_paper(model: str, processes: int, gpu: str, console: Console) -> None:
    """Prints the paper's times if these are its model and machines."""
    if (model, processes, gpu) != SETTING:
        return
    console.print("measured in the paper, ms a step, blocks of 1024, p = 4, roots at every step:", soft_wrap=True)
    for name, milliseconds in MILLISECONDS.items():
        console.print(f"  {name:40} {milliseconds}", highlight=False)
