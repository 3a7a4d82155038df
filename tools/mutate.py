#!/usr/bin/env python3
"""Do the tests bite? Puts one plausible bug after the other into a copy of the source and runs the tests that should fail.

tools/mutations.toml declares the bugs: a file, a text that stands in it exactly once, what stands there instead, and
the tests that are to notice, as "TARGET FILTER" (a CMake target and a GoogleTest filter). The copy and its build live
in build/mutate, and the working tree is only read. What is built once stays; with ccache the way back costs little.

  tools/mutate.py --list                    the bugs, without running anything; a text that is gone is an error
  tools/mutate.py                           all of them: score and survivors; exit status 1 if the score is below --least
  tools/mutate.py --only engine/            those whose file or name contains one of the words
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ["CMakeLists.txt", "CMakePresets.json", "cmake", "src", "tests", "models", "fourfold", "packages", "tools",
           "docs", "DESIGN.md", "README.md"]


def fail(message):
    sys.exit(f"mutate: {message}")


def declared(path):
    mutations = tomllib.loads(path.read_text())["mutation"]
    names = set()
    for m in mutations:
        for key in ("name", "file", "old", "new", "tests"):
            if key not in m:
                fail(f"{path.name}: {m.get('name', 'a mutation')} has no '{key}'")
        if m["name"] in names:
            fail(f"{path.name}: two mutations are called '{m['name']}'")
        names.add(m["name"])
        text = (ROOT / m["file"]).read_text() if (ROOT / m["file"]).exists() else ""
        count = text.count(m["old"])
        if count != 1:
            fail(f"{m['name']}: its old text stands {count} times in {m['file']}, wanted once")
        if m["old"] == m["new"]:
            fail(f"{m['name']}: changes nothing")
    return mutations


def copy_tree(tree):
    """Makes `tree` equal to the working tree, touching only files that differ."""
    tree.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FOLDERS],
                            cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    wanted = {name for name in listed if name and (ROOT / name).exists()}
    for name in wanted:
        source, target = ROOT / name, tree / name
        if source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_symlink():
                target.symlink_to(os.readlink(source))
            continue
        if target.exists() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        os.utime(target)
    for folder in ("src", "tests"):
        for path in (tree / folder).rglob("*"):
            if path.is_file() and str(path.relative_to(tree)) not in wanted:
                path.unlink()


class Runner:
    def __init__(self, options):
        self.options = options
        self.tree = options.tree.resolve()
        self.build = options.build.resolve()
        if self.tree == ROOT or ROOT.is_relative_to(self.tree):
            fail(f"{self.tree} is the working tree; wanted a directory for a copy")

    def prepare(self):
        copy_tree(self.tree)
        if not (self.build / "build.ninja").exists():
            launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
            self.command(["cmake", "-S", self.tree, "-B", self.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                          *launcher], None, "configuring the copy")

    def command(self, arguments, limit, what):
        result = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, timeout=limit)
        if result.returncode != 0:
            fail(f"{what}: {(result.stdout + result.stderr)[-2000:]}")

    def compile(self, targets):
        """Empty, or the end of what the compiler said."""
        done = subprocess.run(["ninja", "-C", str(self.build), f"-j{self.options.jobs}", *targets], capture_output=True,
                              text=True)
        return "" if done.returncode == 0 else done.stdout[-1500:]

    def test(self, target, pattern):
        """What a failing test printed, or None if all passed."""
        found = [p for p in (self.build / "tests").glob(f"*/{target}") if os.access(p, os.X_OK)]
        if not found:
            fail(f"no program {target} under {self.build}/tests")
        try:
            done = subprocess.run([found[0], f"--gtest_filter={pattern}", "--gtest_brief=1", "--gtest_fail_fast"],
                                  capture_output=True, text=True, errors="replace", timeout=self.options.limit,
                                  cwd=self.build)
        except subprocess.TimeoutExpired:
            return f"{target}: longer than {self.options.limit} s"
        if done.returncode == 0:
            if "Running 0 tests" in done.stdout or "0 tests from 0" in done.stdout:
                fail(f"{target} has no tests {pattern}")
            return None
        for line in done.stdout.splitlines():
            if "FAILED  ]" in line:
                return line.split("]", 1)[1].strip().split(" (")[0].split(",")[0]
        return f"{target}: exit status {done.returncode}"

    def baseline(self, mutations):
        wanted = sorted({test for m in mutations for test in m["tests"]})
        message = self.compile(sorted({test.split(" ", 1)[0] for test in wanted}))
        if message:
            fail(f"the unchanged tree does not build: {message}")
        for test in wanted:
            target, pattern = test.split(" ", 1)
            start = time.monotonic()
            failed = self.test(target, pattern)
            if failed:
                fail(f"unchanged, {test} fails: {failed}")
            if time.monotonic() - start > self.options.limit / 3:
                fail(f"unchanged, {test} takes {time.monotonic() - start:.0f} s, more than a third of --limit")

    def run(self, mutation):
        """(verdict, by what): verdict is caught, survived or broken (does not compile)."""
        path = self.tree / mutation["file"]
        original = path.read_text()
        path.write_text(original.replace(mutation["old"], mutation["new"]))
        try:
            message = self.compile(sorted({test.split(" ", 1)[0] for test in mutation["tests"]}))
            if message:
                return "broken", message
            for test in mutation["tests"]:
                failed = self.test(*test.split(" ", 1))
                if failed:
                    return "caught", failed
            return "survived", ""
        finally:
            path.write_text(original)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutations and check their texts")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="those whose file or name contains a word")
    parser.add_argument("--declared", type=pathlib.Path, default=ROOT / "tools/mutations.toml")
    parser.add_argument("--tree", type=pathlib.Path, default=ROOT / "build/mutate/tree", help="where the copy is kept")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/mutate/build", help="and its build")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=300, help="seconds that a run of tests may take")
    parser.add_argument("--least", type=float, default=95, help="percent that must be caught")
    parser.add_argument("--json", type=pathlib.Path, help="where verdicts are written")
    options = parser.parse_args()

    mutations = [m for m in declared(options.declared)
                 if not options.only or any(word in m["file"] or word in m["name"] for word in options.only)]
    if not mutations:
        fail(f"--only {' '.join(options.only)}: no mutation has that in its file or name")
    if options.list:
        for m in mutations:
            print(f"{m['file']}: {m['name']}  [{', '.join(m['tests'])}]")
        print(f"{len(mutations)} mutations")
        return
    runner = Runner(options)
    runner.prepare()
    runner.baseline(mutations)
    verdicts = []
    for i, m in enumerate(mutations):
        start = time.monotonic()
        verdict, by = runner.run(m)
        verdicts.append({"name": m["name"], "file": m["file"], "verdict": verdict, "by": by})
        print(f"[{i + 1}/{len(mutations)}] {verdict:8} {m['file']}: {m['name']}"
              f"{' -- ' + by if by else ''} ({time.monotonic() - start:.0f} s)", flush=True)
        if options.json:
            options.json.write_text(json.dumps(verdicts, indent=1))
    caught = sum(v["verdict"] == "caught" for v in verdicts)
    score = 100 * caught / len(verdicts)
    print(f"{caught} of {len(verdicts)} caught: {score:.1f} %")
    for v in verdicts:
        if v["verdict"] != "caught":
            print(f"  {v['verdict']}: {v['file']}: {v['name']}")
    sys.exit(0 if score >= options.least else 1)


if __name__ == "__main__":
    main()
