"""Which trunk drafts best? Variants trained on the same answers with the same seeds, compared as they learn.

A variant is `baseline` or changes of it, fields of `osd.learn.pretrain_config.PretrainConfig` as
`field=value` joined by `&`; layers are joined by `+`. Every variant learns from the same answers in the
same order and is judged on the same held-back prompts, whose every answer is kept from training. Shards are
those that `polydraft pretrain` collects, with all layers that any variant reads (`--collect-layers`).

A learning curve is read at equal tokens; first-token acceptance and τ of greedy chains are exact for greedy
decoding (`osd/learn/simulate.py`). Seconds a step leave evaluation out. Results are written after every
variant, and variants that a file of results already holds are not run again.

    python benchmarks/trunk.py --shards out/trunk --answers 1200 --epochs 3 --variants \\
      baseline layers=9+20+30 init=target draft_vocab=4096 loss=total_variation support=full

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafts.errors import InvalidValueError
from osd.learn.initial import initial_trunk
from osd.learn.pretrain import Step, train
from osd.learn.pretrain_config import PretrainConfig
from osd.learn.pretrain_data import Answer, coverage, load_shards
from osd.learn.simulate import simulate
from osd.learn.unroll import bf16_product
from osd.lent import Lent
from osd.serve.facts import default_feature_layers
from osd.serve.lend import lend, shard_facts
from osd.serve.load import load_target
from osd.shards import check_folder, read_facts, shard_files
from router.app.pretrain_facts import prompt_of
from router.app.provenance import provenance
from router.config import load_config


def variant(text: str, shared: dict[str, Any]) -> PretrainConfig:
    """The settings that ``text`` names."""
    changes: dict[str, Any] = {}
    for part in [] if text == "baseline" else text.split("&"):
        field, equals, value = part.partition("=")
        if not equals or field not in PretrainConfig.model_fields:
            raise InvalidValueError(
                "--variants", part, f"field=value of {sorted(PretrainConfig.model_fields)}"
            )
        layers = [int(layer) for layer in value.split("+")] if field == "layers" else None
        changes[field] = layers or (json.loads(value) if value[:1].isdigit() else value)
    return PretrainConfig.model_validate({**shared, **changes})


def chosen_prompts(
    files: Sequence[Path], answers: int, held: int, seed: int
) -> tuple[frozenset[str], frozenset[str]]:
    """Prompts to train on, whole until there are ``answers`` of them, and ``held`` prompts to judge by.

    Both are spread over the labels as the shards are, since the order is a seeded shuffle of all prompts.
    """
    counted: Counter[str] = Counter()
    for file in files:
        counted.update(entry["prompt"] for entry in json.loads(file.read_text()) if len(entry["out"]) > 1)
    order = sorted(counted)
    random.Random(seed).shuffle(order)
    training: list[str] = []
    total = 0
    for prompt in order[held:]:
        if total >= answers:
            break
        training.append(prompt)
        total += counted[prompt]
    return frozenset(training), frozenset(order[:held])


def first_of_each(answers: Sequence[Answer]) -> list[Answer]:
    """One answer to every prompt, the one read first: that of the first folder named."""
    return list({prompt_of(answer): answer for answer in reversed(answers)}.values())[::-1]


def run(
    lent: Lent,
    files: Sequence[Path],
    prompts: tuple[frozenset[str], frozenset[str]],
    config: PretrainConfig,
    points: int,
) -> dict[str, Any]:
    """Train one variant; returns its figures, ``points`` of them an epoch."""
    layers = config.layers
    training = load_shards(files, layers, lambda entry: entry["prompt"] in prompts[0])
    held = first_of_each(load_shards(files, layers, lambda entry: entry["prompt"] in prompts[1]))
    things = lent.reading(layers)
    trunk = initial_trunk(things, training, held, config)
    output = things.output[trunk.token_ids].contiguous()
    curve: list[dict[str, Any]] = []
    steps: list[float] = []
    losses: list[float] = []
    last = time.perf_counter()

    def progress(step: Step) -> None:
        nonlocal last
        steps.append(time.perf_counter() - last)
        losses.append(step.loss)
        an_epoch = step.steps // config.epochs
        if step.number % max(1, an_epoch // points) == 0 or step.number == step.steps:
            with torch.no_grad():
                labels = simulate(trunk, things.embedding, output, held)
            loss = sum(losses) / len(losses)
            losses.clear()
            curve.append(
                {
                    "tokens": step.tokens,
                    "step": step.number,
                    "loss": loss,
                    "labels": {label: asdict(figures) for label, figures in labels.items()},
                }
            )
            every = labels["all"]
            print(
                f"  {step.tokens:8} tokens, step {step.number}: loss {loss:.3f}, first token "
                f"{every.first_token:.3f}, tau of chains of {len(every.tau)} {every.tau[-1]:.2f}",
                flush=True,
            )
        last = time.perf_counter()

    train(trunk, things, training, held[:1], config, progress=progress)
    return {
        "config": config.as_dict(),
        "layers": list(things.shape.feature_layers),
        "draft_vocabulary": len(trunk.token_ids),
        "held_back_coverage": round(coverage(held, trunk.token_ids), 4),
        "answers": len(training),
        "answer_tokens": sum(answer.output_length for answer in training),
        "held_back": len(held),
        "parameters": sum(tensor.numel() for tensor in trunk.tensors.values()),
        "product": "bfloat16" if trunk.product is bf16_product else "plain",
        "seconds_a_step": round(statistics.median(steps), 4),
        "curve": curve,
    }


def show(results: dict[str, Any]) -> None:
    """First-token acceptance and τ of the longest chain per label, after the last step."""
    labels = list(next(iter(results.values()))["curve"][-1]["labels"])
    print(" " * 32 + "".join(f"{label[:13]:>14}" for label in labels) + "    s/step")
    for name, result in results.items():
        figures = result["curve"][-1]["labels"]
        cells = "".join(f"{figures[n]['first_token']:8.3f}{figures[n]['tau'][-1]:6.2f}" for n in labels)
        print(f"{name:32}{cells}{result['seconds_a_step']:10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", nargs="+", type=Path, required=True, help="folders of one target")
    parser.add_argument("--variants", nargs="+", default=["baseline"])
    parser.add_argument("--config", default="configs/demo.yaml", help="deployment whose target answered")
    parser.add_argument("--layers", default=None, help="layers of the baseline; the target's own by default")
    parser.add_argument("--answers", type=int, default=1200, help="answers to train on")
    parser.add_argument("--held", type=int, default=120, help="held-back prompts")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=8192, help="of the baseline")
    parser.add_argument("--points", type=int, default=2, help="points of the curve an epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="results, written after every variant and gone on with")
    arguments = parser.parse_args()

    wanted = load_config(arguments.config).target
    kept = read_facts(arguments.shards[0]).feature_layers
    target, _ = load_target(wanted.model, wanted.device, wanted.dtype, "lean", wanted.cache_dir, kept)
    for folder in arguments.shards:
        check_folder(folder, shard_facts(target))
    lent = lend(target)
    del target
    own = arguments.layers.split("+") if arguments.layers else default_feature_layers(lent.layers)
    files = [file for folder in arguments.shards for file in shard_files(folder)]
    shared = {
        "layers": [int(layer) for layer in own],
        "draft_vocab": arguments.draft_vocab,
        "epochs": arguments.epochs,
        "seed": arguments.seed,
    }
    configs = {text: variant(text, shared) for text in arguments.variants}
    prompts = chosen_prompts(files, arguments.answers, arguments.held, arguments.seed)
    subset = {name: getattr(arguments, name) for name in ("answers", "held", "epochs", "seed")}
    result: dict[str, Any] = {"subset": subset, "variants": {}}
    if arguments.json and arguments.json.exists():
        result = json.loads(arguments.json.read_text(encoding="utf-8"))
        if result["subset"] != subset:
            raise InvalidValueError("--json", str(arguments.json), f"a file of the same subset, not {subset}")
    for text, config in configs.items():
        if text in result["variants"]:
            continue
        print(text, flush=True)
        result["variants"][text] = run(lent, files, prompts, config, arguments.points)
        result["provenance"] = provenance(arguments.seed)
        if arguments.json:
            arguments.json.write_text(json.dumps(result), encoding="utf-8")
    show(result["variants"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
