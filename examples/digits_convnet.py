"""A small convolutional net on scikit-learn's digits: python examples/digits_convnet.py"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from dash_shampoo import Dash, param_groups


class ConvNet(nn.Sequential):
    def __init__(self, width: int = 24) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images).float().unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    model = ConvNet().to(memory_format=torch.channels_last)
    optimizer = Dash(param_groups(model), lr=3e-3, weight_decay=1e-2, update_every=10)
    losses = []
    for _ in range(6):
        for batch in torch.tensor(train)[torch.randperm(len(train))].split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    if accuracy < 0.95:
        raise SystemExit(f"only {accuracy:.1%} of the test digits are recognised")
    print(f"{accuracy:.1%} of the test digits are recognised")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
