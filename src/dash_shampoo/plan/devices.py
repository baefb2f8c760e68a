"""Peak rates of devices, from their makers' data sheets."""

from __future__ import annotations

from typing import NamedTuple

# How many narrow products a product in each precision is.
NARROW_PRODUCTS = {"fp16": 1, "bf16": 1, "fp16x3": 3, "bf16x3": 3}


class Device(NamedTuple):
    """Peak rates of one device.

    Attributes:
        fp32: FLOP/s of products in true float32.
        tf32: FLOP/s of dense products in TF32.
        fp16: FLOP/s of dense products in float16 or bfloat16, added up in float32.
        memory: bytes/s from and to memory.
        link: bytes/s that it sends to, and at once receives from, devices of its node.
        network: bytes/s that it sends to, and at once receives from, other nodes.
        per_node: devices in a node.
    """

    fp32: float
    tf32: float
    fp16: float
    memory: float
    link: float
    network: float
    per_node: int

    @property
    def tensor_cores(self) -> bool:
        """Whether products in narrow formats are faster than float32's."""
        return self.tf32 > self.fp32

    def product(self, precision: str) -> float:
        """FLOP/s, counted as products of two matrices, in one of `dash_shampoo.kernels.PRECISIONS` but "mixed"."""
        if precision in NARROW_PRODUCTS:
            return self.fp16 / NARROW_PRODUCTS[precision]
        return self.tf32 if precision == "tf32" else self.fp32

    def wire(self, processes: int) -> float:
        """Bytes/s between devices, of as many processes: within a node if they are all there."""
        return self.link if processes <= self.per_node else self.network


# Data sheets give the rates of tensor cores for sparse matrices, twice those of dense ones, and NVLink's both
# directions together; networks are the eight adapters of a DGX system of that generation, one per device.
DEVICES = {
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf
    # (A100 80GB SXM: 19.5 TFLOPS, 156, 312, 2,039 GB/s, NVLink 600 GB/s); DGX A100: 8 x 200 Gb/s InfiniBand,
    # https://images.nvidia.com/aem-dam/Solutions/Data-Center/nvidia-dgx-a100-datasheet.pdf
    "a100": Device(19.5e12, 156e12, 312e12, 2.039e12, 300e9, 25e9, 8),
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (H100 SXM: 67 TFLOPS, 989 and
    # 1,979 sparse, 3.35 TB/s, NVLink 900 GB/s); DGX H100: 8 x 400 Gb/s InfiniBand,
    # https://resources.nvidia.com/en-us-dgx-systems/ai-enterprise-dgx
    "h100": Device(67e12, 494.5e12, 989.5e12, 3.35e12, 450e9, 50e9, 8),
    # https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446 (H200 SXM: 67 TFLOPS, 989 and 1,979
    # sparse, 4.8 TB/s, NVLink 900 GB/s); network as DGX H100.
    "h200": Device(67e12, 494.5e12, 989.5e12, 4.8e12, 450e9, 50e9, 8),
    # https://www.nvidia.com/en-us/data-center/hgx/ (HGX B200, eight of them: 600 TFLOPS, 18 PFLOPS and 36 PFLOPS
    # sparse, NVLink 1.8 TB/s each); https://www.nvidia.com/en-us/data-center/dgx-b200/ (64 TB/s for eight, 400 Gb/s
    # adapters).
    "b200": Device(75e12, 1.125e15, 2.25e15, 8.0e12, 900e9, 50e9, 8),
    # A server's processor, https://www.amd.com/en/products/processors/server/epyc/4th-generation-9004-and-8004-series/
    # amd-epyc-9654.html: 96 cores at 2.4 GHz, with two 256-bit fused multiply-adds a cycle each (32 FLOP), 460.8 GB/s.
    # Products narrower than float32 are float32 ones there. One process a node, on 100 Gb/s: an assumption.
    "cpu": Device(7.37e12, 7.37e12, 7.37e12, 460.8e9, 12.5e9, 12.5e9, 1),
}
