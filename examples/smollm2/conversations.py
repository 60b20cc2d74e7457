"""Makes conversations and a test of right answers from the documentation of installed Python packages.

    pip install numpy pandas networkx sympy torch
    python3 conversations.py DIR

`train.jsonl` has four conversations for each function or class, and `held-out.jsonl` has the same four for functions and classes that are not in
`train.jsonl`. `task.jsonl` has multiple-choice questions about functions of `train.jsonl`: the module that defines the function, among three other
modules of the same top-level package. No conversation has the wording of these questions. No name that hints at its module is asked for. The same versions
of the packages and the same seed give the same files; `sources.json` has the versions.
"""

import argparse
import collections
import hashlib
import importlib
import inspect
import json
import logging
import os
import pathlib
import pkgutil
import platform
import random
import re
import sys
import warnings

STANDARD = (
    "argparse ast asyncio base64 calendar codecs collections concurrent configparser contextlib csv ctypes dataclasses datetime decimal difflib dis "
    "doctest email encodings enum fileinput fractions functools gettext glob gzip html http imaplib importlib inspect ipaddress json linecache locale "
    "logging mailbox mimetypes multiprocessing optparse os pathlib pdb pickle pickletools pkgutil platform plistlib pprint random re shelve shlex shutil "
    "smtplib socket socketserver sqlite3 ssl statistics string subprocess sysconfig tarfile tempfile textwrap threading timeit tokenize trace traceback "
    "tracemalloc types typing unittest urllib uuid venv warnings wave weakref wsgiref xml xmlrpc zipapp zipfile zoneinfo"
).split()
LIBRARIES = ["networkx", "numpy", "pandas", "sympy", "torch"]
STANDARD_LIBRARY = "the standard library"
CHOICES, SHORTEST_HINT = 4, 4
DOC_CHARS, SIGNATURE_CHARS = 600, 300


def modules(package):
    """The package and its public modules that can be imported, without tests and benchmarks."""
    root = importlib.import_module(package)
    yield root
    for found in pkgutil.walk_packages(getattr(root, "__path__", []), package + ".", onerror=lambda name: None):
        if any(part.startswith("_") or "test" in part or "bench" in part for part in found.name.split(".")):
            continue
        try:
            yield importlib.import_module(found.name)
        except BaseException:  # Modules of other platforms cannot be imported.
            continue


def signature(thing):
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return None
    # Addresses of objects differ from run to run.
    return text if len(text) <= SIGNATURE_CHARS and " at 0x" not in text else None


def documented(module, package):
    """Functions and classes that the module defines and documents."""
    for name, thing in sorted(vars(module).items()):
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        doc = (inspect.getdoc(thing) or "").partition("\n\n")[0].strip()
        if 20 <= len(doc) <= DOC_CHARS:
            yield {"name": name, "module": module.__name__, "package": package, "doc": doc, "signature": signature(thing)}


def functions(packages):
    """All of them that have a name and a documentation of their own."""
    found = []
    for package in packages:
        label = package if package in LIBRARIES else STANDARD_LIBRARY
        found += [function for module in modules(package) for function in documented(module, label)]
    names, docs = (collections.Counter(function[key] for function in found) for key in ("name", "doc"))
    return [function for function in found if names[function["name"]] == 1 and docs[function["doc"]] == 1]


def mixed(seed, text):
    return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()


def chosen(found, seed, most):
    """At most `most` functions a package, in an order that the seed decides."""
    order = sorted(found, key=lambda function: mixed(seed, function["name"]))
    taken, counts = [], collections.Counter()
    for function in order:
        counts[function["package"]] += 1
        if counts[function["package"]] <= most:
            taken.append(function)
    return taken


def ask(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def conversations(function):
    name, module, package, doc = (function[key] for key in ("name", "module", "package", "doc"))
    call = f"`{name}{function['signature']}`" if function["signature"] else f"`{name}`"
    yield ask(f"What does `{name}` do?", doc)
    yield ask(f"Which module defines `{name}`?", f"`{name}` is defined in `{module}`.") + ask("How is it called?", call)
    yield ask(f"Where in {package} do I find `{name}`?", f"You find `{name}` in `{module}`.")
    yield ask(f"I look for something in {package} with this description: {doc}", f"Take `{name}`. The module `{module}` has it.")


def words(name):
    """Parts of a name in lower case: `read_HTMLTable` has read, html and table."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def hints(function):
    """Whether the name or a part of it occurs in the path of the module, or the other way round."""
    path = function["module"].lower()
    parts = [part for part in re.split(r"[._]", path.partition(".")[2]) if len(part) >= SHORTEST_HINT]
    return any(word in path for word in words(function["name"]) if len(word) >= SHORTEST_HINT) or any(part in function["name"].lower() for part in parts)


def top(function):
    return function["module"].partition(".")[0]


def question(function, places, draw):
    """A question with the right module and three other modules of its top-level package, drawn in proportion to their numbers of functions."""
    pool = places[top(function)]
    choices = [function["module"]]
    while len(choices) < CHOICES:
        other = draw.choice(pool)
        if other not in choices:
            choices.append(other)
    draw.shuffle(choices)
    return {
        "question": f"I want to use `{function['name']}`. From which module do I import it?", "before": f"Import `{function['name']}` from `",
        "choices": choices, "after": "`.", "answer": choices.index(function["module"]), "name": function["name"],
    }  # fmt: skip


def questions(train, count, seed):
    places = collections.defaultdict(list)
    for function in train:
        places[top(function)].append(function["module"])
    asked = [function for function in train if not hints(function) and len(set(places[top(function)])) >= CHOICES]
    asked.sort(key=lambda function: mixed(seed + 1, function["name"]))
    draw = random.Random(seed)
    return [question(function, places, draw) for function in asked[:count]]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def records(found):
    return [{"messages": messages} for function in found for messages in conversations(function)]


def versions(packages):
    found = {package: getattr(sys.modules[package], "__version__", None) for package in packages if package in LIBRARIES}
    return {"python": platform.python_version(), **found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="directory to write")
    parser.add_argument("--packages", nargs="+", default=STANDARD + LIBRARIES, help="packages whose documentation is taken")
    parser.add_argument("--most", type=int, default=300, help="functions and classes of a package at most")
    parser.add_argument("--held-out", type=int, default=120, help="functions and classes that are held out")
    parser.add_argument("--questions", type=int, default=500, help="questions of the test at most")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # Some modules print when they are imported.
    found = chosen(functions(options.packages), options.seed, options.most)
    sys.stdout = out
    if len(found) <= options.held_out:
        sys.exit(f"cannot hold out {options.held_out} of {len(found)} functions: name more --packages")
    held_out, train = found[: options.held_out], found[options.held_out :]
    options.folder.mkdir(parents=True, exist_ok=True)
    task = questions(train, options.questions, options.seed)
    write(options.folder / "train.jsonl", records(train))
    write(options.folder / "held-out.jsonl", records(held_out))
    write(options.folder / "task.jsonl", task)
    (options.folder / "sources.json").write_text(json.dumps({"versions": versions(options.packages), "seed": options.seed}) + "\n")
    print(f"{len(train)} functions to train on, {len(held_out)} held out, {len(task)} questions in {options.folder}")


if __name__ == "__main__":
    main()
