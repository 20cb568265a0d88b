"""Train `tiny`, the checkpoint that ships with the package, on the source text of the running Python's standard library.

python tools/train_tiny.py --out DIR           train, export, evaluate and write the model card: within one hour
python tools/train_tiny.py --evaluate DIR      measure an exported checkpoint again
"""

import argparse
import dataclasses
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
from tiny_training.card import write_card
from tiny_training.circuits import start_as_copier
from tiny_training.config import Recipe, TinyConfig, restart_with_malloc_settings
from tiny_training.corpus import Document, Tokens, encode, read_documents, train_tokenizer
from tiny_training.evaluate import evaluate
from tiny_training.export import export
from tiny_training.grow import grow
from tiny_training.network import Network
from tiny_training.training import shallow_phase, train_chain, train_on_text, trunk_phase
from tokenizers import Tokenizer

PHASES = ("shallow", "trunk", "chain")


def prepare(config: TinyConfig, documents: list[Document], work: Path) -> tuple[Tokenizer, Tokens]:
    """The tokenizer, trained on training files only or taken from an earlier start in `work`, and all tokens."""
    path = work / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        training = (document.text for document in documents if not document.is_held_out)
        tokenizer = train_tokenizer(training, config.vocab_size)
        tokenizer.save(str(path))
    return tokenizer, encode(documents, tokenizer)


def train(out: Path, work: Path, recipe: Recipe, workers: int, is_compiled: bool) -> None:
    """Train, export, evaluate and describe; with the files of an earlier start in `work`, go on from there."""
    started = time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    config = TinyConfig()
    documents = read_documents()
    tokenizer, tokens = prepare(config, documents, work)
    prepared = time.monotonic()
    sizes = {name: len(ids) for name, ids in tokens._asdict().items()}
    print(f"{len(documents)} files, tokens {sizes}, {prepared - started:.0f} s", flush=True)

    network = Network(config, recipe.chunk)
    record = work / "run.json"
    if record.exists():
        run = json.loads(record.read_text(encoding="utf-8"))
        network.load_state_dict(torch.load(work / "trunk.0.pt")["parameters"])
    else:
        run = {
            "python": platform.python_version(),
            "files": len(documents),
            "tokens": sizes,
            "characters": sum(len(document.text) for document in documents),
            "recipe": dataclasses.asdict(recipe),
        }
        shallow = Network(config.shallow, recipe.chunk)
        shallow.initialise(recipe.seed)
        start_as_copier(shallow, recipe.seed)
        options = (workers, is_compiled)
        phase = shallow_phase(recipe)
        run["shallow"] = train_on_text(shallow, tokens, recipe, phase, work / "shallow", *options).summary
        grow(shallow, network)
        phase = trunk_phase(recipe)
        run["trunk"] = train_on_text(network, tokens, recipe, phase, work / "trunk", *options).summary
        record.write_text(json.dumps(run), encoding="utf-8")
        export(network, tokenizer, out)  # usable, whatever happens to the last phase
    run["chain"] = train_chain(network, tokens, recipe, work / "chain", workers).summary
    export(network, tokenizer, out)
    trained = time.monotonic()
    torch.set_num_threads(workers)
    figures = evaluate(out, documents)
    phases = sum(run[name]["seconds"] for name in PHASES)  # these count earlier starts as well
    run["seconds"] = prepared - started + phases + time.monotonic() - trained
    record.write_text(json.dumps(run), encoding="utf-8")
    write_card(out, config, run, figures)
    print(json.dumps(figures, indent=1), flush=True)
    print(f"done in {run['seconds']:.0f} s: {out}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="directory to write the checkpoint into")
    target.add_argument(
        "--evaluate", type=Path, metavar="DIR", help="directory of an exported checkpoint to measure"
    )
    parser.add_argument(
        "--work", type=Path, help="directory of a run to go on with; default: a new temporary one"
    )
    parser.add_argument("--steps", type=int, help="at most this many steps in each phase, for a trial run")
    parser.add_argument("--seconds", type=float, help="seconds for all phases together; default: 3120")
    parser.add_argument("--no-compile", action="store_true", help="run all layers eagerly")
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of one core each: 1, 2 or 4; default: 2"
    )
    arguments = parser.parse_args()
    restart_with_malloc_settings()
    torch.set_num_threads(1)  # workers are forked, and a fork must not inherit threads

    if arguments.evaluate:
        print(json.dumps(evaluate(arguments.evaluate, read_documents()), indent=1))
        return
    recipe = Recipe()
    if arguments.steps:
        steps = {f"{name}_steps": arguments.steps for name in PHASES}
        recipe = dataclasses.replace(recipe, **steps)
    if arguments.seconds:
        seconds = {f"{name}_seconds": getattr(recipe, f"{name}_seconds") for name in PHASES}
        scale = arguments.seconds / sum(seconds.values())
        recipe = dataclasses.replace(recipe, **{name: scale * value for name, value in seconds.items()})
    work = arguments.work or Path(tempfile.mkdtemp(prefix="train-tiny-"))
    print(f"work in {work}; go on after a crash with --work {work}", flush=True)
    train(arguments.out, work, recipe, arguments.workers, not arguments.no_compile)


if __name__ == "__main__":
    main()
