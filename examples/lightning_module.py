"""Dash in a LightningModule: python examples/lightning_module.py"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dash_shampoo import Dash, param_groups


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = Dash(param_groups(self), lr=1e-2, update_every=5)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(480, 16)
    batches = DataLoader(TensorDataset(x, x.norm(dim=1, keepdim=True)), batch_size=32, shuffle=True)
    module = Regression()
    trainer = lightning.Trainer(
        max_steps=60, logger=False, enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=1.0
    )
    trainer.fit(module, batches)
    print(f"loss {module.losses[0]:.4f} -> {module.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
