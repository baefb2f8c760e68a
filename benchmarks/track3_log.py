"""Logs of `track3.py`: the program that repeats a run, and the track's test of the losses of several runs."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import dash_shampoo
from dash_shampoo.train.errors import InputError

# A run needs (3.28 - mean) sqrt(runs) of at least 0.004: 3.09 of the deviations that the track grants a run, p < 0.001.
TARGET, MARGIN, DEVIATION = 3.28, 0.004, 0.0013

RULER, MARK = "=" * 100, "#" * 100 + "\n"
COMMANDS = ("bench", "compare", "plan")  # packages of the library that no training imports
PRELUDE = """\
# dash-shampoo {version} on modded-nanogpt's track 3. The library is in comments at the end, and unpacked from there.
import pathlib, sys, tempfile
sys.argv[1:1] = {words}
unpacked = tempfile.TemporaryDirectory()
sys.path.insert(0, unpacked.name)
for part in pathlib.Path(__file__).read_text(encoding="utf-8").split("\\n#> ")[1:]:
    path, *lines = part.rstrip("\\n").split("\\n")
    pathlib.Path(unpacked.name, path).parent.mkdir(parents=True, exist_ok=True)
    text = "".join(line[2:] + "\\n" for line in lines)
    pathlib.Path(unpacked.name, path).write_text(text, encoding="utf-8")
"""


def program(script: Path, arguments: argparse.Namespace) -> str:
    """A script with the arguments of a run and all that it imports of dash-shampoo: what it takes to repeat the run.

    Args:
        script: a file, which may be such a program itself.
        arguments: of the run; those of the program's command line count more.
    """
    library = Path(dash_shampoo.__file__).parent
    files = {file.relative_to(library.parent): file for file in sorted(library.rglob("*.py"))}
    files = {Path(Path(__file__).name): Path(__file__), **files}
    text = script.read_text(encoding="utf-8").rpartition(MARK)[2].partition("\n#> ")[0]
    packed = [PRELUDE.format(version=dash_shampoo.__version__, words=words(arguments)) + MARK + text.rstrip() + "\n"]
    for path, file in files.items():
        if path.parts[1:2] not in [(name,) for name in COMMANDS]:
            packed += [
                f"#> {path.as_posix()}",
                *("#|" + line for line in file.read_text("utf-8").rstrip("\n").split("\n")),
            ]
    return "\n".join(packed)


def words(arguments: argparse.Namespace) -> list[str]:
    """The arguments of a run as on the command line, without the log's path."""
    found: list[str] = []
    for name, value in vars(arguments).items():
        if name in ("out", "judge") or value is False:
            continue
        flag = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            found += [flag] if each is True else [flag, str(each)]
    return found


def read_log(path: Path) -> tuple[str, str, dict[int, float]]:
    """A log's program without its seed, the seed, and the losses by step, of which the last ends the run.

    Raises:
        InputError: it is no log, or it ends before its run.
    """
    try:
        text, _, rest = path.read_text(encoding="utf-8").partition(f"\n{RULER}\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: give logs of track3.py") from error
    seed = re.search(r"(?<='--seed', ')\d+", text)
    found = re.findall(r"^step:(\d+)/(\d+) val_loss:(\S+)", rest, re.MULTILINE)
    if seed is None or not found or found[-1][0] != found[-1][1]:
        raise InputError(f"{path} is no log of a run that came to its end: run that seed again, and leave none out")
    if "'--toy'" in text[: text.index(MARK)]:
        raise InputError(f"{path} is of a toy run, which is no entry: judge runs of the track's model")
    return text[: seed.start()] + text[seed.end() :], seed[0], {int(step): float(loss) for step, _, loss in found}


def verdict(losses: list[float]) -> tuple[float, float, float]:
    """The mean of the losses of several runs, its margin, and the p-value of the one-sided z-test."""
    mean = math.fsum(losses) / len(losses)
    margin = round((TARGET - mean) * math.sqrt(len(losses)), 12)  # 3.276 of one run passes, whatever its rounding
    return mean, margin, 0.5 * math.erfc(margin / DEVIATION / math.sqrt(2))


def judge(paths: list[Path]) -> bool:
    """Prints what the rules say of all runs together, and returns whether they pass at their last step.

    Raises:
        InputError: the logs cannot be judged together.
    """
    programs, seeds, losses = zip(*map(read_log, paths), strict=True)
    if len(set(programs)) > 1:
        raise InputError("the logs are of different programs or options: judge runs that differ in their seed alone")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"a run counts once: these are of the seeds {', '.join(seeds)}")
    verdicts = {step: verdict([each[step] for each in losses]) for step in losses[0]}
    last = max(verdicts)
    # The rules let runs end earlier, at one step for all.
    passing = [step for step, (_, margin, _) in verdicts.items() if margin >= MARGIN]
    for step in dict.fromkeys([*passing[:1], last]):
        mean, margin, p = verdicts[step]
        print(f"step {step}: mean loss {mean:.5f} of {len(paths)}, margin {margin:.5f} of {MARGIN}, p = {p:.2g}")
    print(f"below {TARGET} as surely as the track asks: {'yes' if last in passing else 'no'}")
    return last in passing
