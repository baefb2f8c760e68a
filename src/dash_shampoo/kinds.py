"""What the parameters of a model are, told by the modules that hold them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

TABLES = (nn.Embedding, nn.EmbeddingBag, nn.AdaptiveLogSoftmaxWithLoss)
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

# A bare parameter that is looked up, or used elementwise, has no class of its own, only a name or its module's.
TABLE = re.compile(r"(^|_)(pos(?!t)|emb|tables?(_|$)|w[pt]e$|tokens?$|latents?$)")
TABLE_CLASS = re.compile(r"(?<!patch)(un)?embed(ding)?s?$")
NORM_CLASS = re.compile(r"norm(\dd)?$")
ELEMENTWISE = re.compile(r"(^|_)bias(es)?(_|$)|^A_log$|^D$")  # the last two are Mamba's
# Tables that no output is compared with: positions, relative positions, segments.
NO_VOCABULARY = re.compile(r"pos|relative|rel_|distance|bias|type|segment|wpe")


class Holder(NamedTuple):
    """A module that has a parameter, and what it calls it."""

    module: nn.Module
    attribute: str

    @property
    def called(self) -> str:
        """The module's class, in lower case."""
        return type(self.module).__name__.lower()


def kinds(model: nn.Module) -> dict[int, str]:
    """What each parameter is, by its id: the name of one of `param_groups`' groups."""
    tables = {id(parameter) for module in [*_tables(model), *_heads(model)] for parameter in module.parameters()}
    found: dict[int, str] = {}
    for parameter, holder in _held(model):
        known = found.setdefault(id(parameter), _kind(parameter, holder))
        if id(parameter) in tables and known != "vectors":
            found[id(parameter)] = "embeddings"
    return found


def _kind(parameter: Tensor, holder: Holder) -> str:
    """What a parameter is that no table's module and no head has."""
    if not _is_matrix(parameter):
        return "vectors"
    if isinstance(holder.module, CONVOLUTIONS):
        return "convolutions" if parameter.ndim > 2 else "matrices"
    if isinstance(holder.module, nn.Linear):
        return "matrices"
    if _is_table(parameter, holder):
        return "embeddings"
    if ELEMENTWISE.search(holder.attribute) or NORM_CLASS.search(holder.called):
        return "elementwise"
    if parameter.ndim > 2:
        return "convolutions" if "conv" in holder.called else "stacks"
    return "matrices"


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def _is_table(parameter: Tensor, holder: Holder) -> bool:
    """Whether a bare parameter is looked up, such as positions and tokens.

    One with a leading dimension of 1 is added to every sample of a batch, unless it is of a stack of one expert.
    """
    if TABLE.search(holder.attribute) or TABLE_CLASS.search(holder.called):
        return True
    return parameter.ndim > 2 and parameter.shape[0] == 1 and not re.search("expert|moe|conv", holder.called)


def _held(model: nn.Module) -> Iterator[tuple[Tensor, Holder]]:
    """Each parameter with its holder: of a parametrised layer (weight_norm) the layer, of a list that list's owner."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        for attribute, parameter in module.named_parameters(recurse=False):
            owner, own = path, attribute
            if match := re.fullmatch(r"(?:(.*)\.)?parametrizations\.(\w+)", path):
                owner, own = match[1] or "", match[2]
            elif isinstance(module, (nn.ParameterList, nn.ParameterDict)):
                owner, _, own = path.rpartition(".")
            yield parameter, Holder(modules[owner], own)


def _tables(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, TABLES))


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """The linear layers onto a vocabulary: those that the model names, and those that `_outputs` finds by its tables.

    Heads that share their weight with a table are tables anyway.
    """
    vocabularies = {
        id(module): module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and not NO_VOCABULARY.search(f"{name.rpartition('.')[2]} {type(module).__name__}".lower())
    }
    yield from _heads_below(model, vocabularies, known=False)


def _heads_below(
    module: nn.Module, vocabularies: dict[int, nn.Embedding | nn.EmbeddingBag], known: bool
) -> Iterator[nn.Module]:
    """The heads in a module, given the tables; ``known``: it is a part of a model that names its head."""
    named = getattr(module, "get_output_embeddings", None)  # of Transformers' models
    head = named() if callable(named) else None
    if isinstance(head, nn.Module):
        yield head
    tables = [vocabularies[id(each)] for each in module.modules() if id(each) in vocabularies]
    if not tables:
        return
    known = known or (callable(named) and not isinstance(head, nn.Embedding))  # which is no head of its own
    if not known or isinstance(head, nn.Module):
        beside = (child for child in module.children() if vocabularies.keys().isdisjoint(map(id, child.modules())))
        yield from _outputs(list(beside), tables)
    for child in module.children():
        yield from _heads_below(child, vocabularies, known)


def _outputs(modules: list[nn.Module], tables: list[nn.Embedding | nn.EmbeddingBag]) -> Iterator[nn.Linear]:
    """The linear layers, at the end of modules beside tables, that nothing takes in and that are as long as a table.

    From the last module to the first, the output of a module is hidden if it is as wide as the tables, or as what a
    later module takes in. Before a hidden linear layer, or what ends in none, there are hidden modules alone.
    """
    length = min(table.num_embeddings for table in tables)
    widths = {table.embedding_dim for table in tables}
    taken: set[int] = set()
    for module in reversed(modules):
        if not any(map(_is_matrix, module.parameters())):
            continue
        alone = isinstance(module, nn.Linear)
        ends = _layers(module, -1)
        sizes = {layer.out_features for layer in ends}
        hidden = bool(sizes & taken) or (bool(sizes & widths) and not (alone and sizes == {length}))
        if not ends or (hidden and alone):
            return
        if not hidden:
            yield from (layer for layer in ends if layer.out_features >= length)
        taken |= {layer.in_features for layer in _layers(module, 0)}


def _layers(module: nn.Module, place: int) -> list[nn.Linear]:
    """The linear layer that a module begins (0) or ends (-1) with; of a list, those of all its elements."""
    if isinstance(module, nn.Linear):
        return [module]
    children = [child for child in module.children() if any(map(_is_matrix, child.parameters()))]
    if children and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        children = [children[place]]
    return [layer for child in children for layer in _layers(child, place)]
