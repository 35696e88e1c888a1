"""`forebay classifier`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from forebay.cli.arguments import add_settings


def _train(args: argparse.Namespace) -> int:
    from forebay.prepare.config import load_recipe
    from forebay.prepare.scores.train import ClassifierSettings, train_classifier
    from forebay.toml import parse_settings

    names = ("held_out", "dim", "word_ngrams", "epochs", "lr", "seed")
    training = ClassifierSettings(**{name: value for name in names if (value := getattr(args, name)) is not None})
    read = load_recipe(settings=parse_settings(args.set)).read
    result = train_classifier(args.good, args.bad, args.out, training, read)
    if args.json:
        print(json.dumps(result))
        return 0
    for label, counts in result["documents"].items():
        print(f"{label}: {counts['train']:,} documents to train on, {counts['held_out']:,} held out")
    print(f"ROC AUC {result['roc_auc']:.4f}, average precision {result['average_precision']:.4f}")
    print(f"{'threshold':>9} {'precision':>9} {'recall':>9} {'bad kept':>9}")
    for point in result["curve"]:
        print("{threshold:>9.4f} {precision:>9.3f} {recall:>9.3f} {bad_kept:>9.3f}".format(**point))
    print(f"{args.out}/model.bin, curve.json")
    return 0


def add_verbs(verb: Any, group: Any) -> None:
    verbs = group("classifier", "train a fastText classifier of good and bad documents")
    p = verb("train", _train, "train a classifier and print its curve on documents held out", verbs)
    p.epilog = "example: forebay classifier train --good wiki/ --bad crawl/ --out edu"
    p.add("--good", nargs="+", required=True, metavar="INPUT", help="files, folders or URLs of documents to keep")
    p.add("--bad", nargs="+", required=True, metavar="INPUT", help="the same of documents to drop")
    p.add("--out", type=Path, required=True, metavar="DIR", help="where to write model.bin and curve.json")
    p.add("--held-out", type=float, metavar="SHARE", help="share of documents to measure on (default: 0.1)")
    p.add("--dim", type=int, metavar="N", help="numbers in a vector (default: 32)")
    p.add("--word-ngrams", type=int, metavar="N", help="longest run of words that is a feature (default: 2)")
    p.add("--epochs", type=int, metavar="N", help="passes over the documents (default: 5)")
    p.add("--lr", type=float, metavar="RATE", help="first learning rate (default: 0.5)")
    p.add("--seed", type=int, metavar="N", help="of the first vectors and the order (default: 0)")
    add_settings(p, "read.text_key=body")
