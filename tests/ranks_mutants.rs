//! Possible errors in the protocol of ranks. Each is made in a copy of the sources, where the tests of the exchange must then fail. `cargo
//! test --test main ranks_mutants -- --ignored` builds and records all of them, one after the other in a separate target directory.

use crate::campaign::record;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The files with the mutated code.
const FILES: [&str; 4] = [
    "src/engine/ranks/peer_exchange/gradients.rs",
    "src/engine/ranks/peer_exchange/reports.rs",
    "src/engine/ranks/peer_exchange/weights.rs",
    "src/engine/ranks/nccl_transport.rs",
];

/// The tests that must detect the mutants.
const TESTS: [&str; 5] = ["test", "--lib", "--", "engine::ranks::peer_exchange::", "engine::ranks::nccl_transport::"];

/// A mutant: replaced text and its replacement, in whichever of the files contains it.
struct Mutant {
    name: &'static str,
    changes: &'static [(&'static str, &'static str)],
}

const MUTANTS: [Mutant; 16] = [
    Mutant { name: "no wait before a pull", changes: &[("        dev.wait_for(Stream::Reduce, mate, peer.written[piece])?;\n", "")] },
    Mutant {
        name: "publish before record",
        changes: &[
            (
                "        dev.record(written, Stream::Compute)?;\n",
                "        self.context.progress.publish_written(self.context.rank);\n        self.context.pass()?;\n        dev.record(written, Stream::Compute)?;\n",
            ),
            ("        self.context.progress.publish_written(self.context.rank);\n        self.context.pass()\n", "        Ok(())\n"),
        ],
    },
    Mutant {
        name: "staging is overwritten before its sum",
        changes: &[
            ("dev.wait_for(Stream::Reduce, mate, peer.written[piece])?", "dev.wait_for(Stream::Gather, mate, peer.written[piece])?"),
            ("dev.pull(Stream::Reduce, mate, peer.memory.grads", "dev.pull(Stream::Gather, mate, peer.memory.grads"),
            (
                "        dev.record(self.gradients.pulled[piece], Stream::Reduce)?;\n",
                "        dev.record(self.gradients.pulled[piece], Stream::Gather)?;\n        dev.wait(Stream::Reduce, self.gradients.pulled[piece])?;\n",
            ),
        ],
    },
    Mutant {
        name: "weights are gathered that are not settled",
        changes: &[(
            "self.context.progress.settled(rank, bucket) >= self.weights.version)",
            "self.context.progress.settled(rank, bucket) + 1 >= self.weights.version)",
        )],
    },
    Mutant {
        name: "the norm is folded rank by rank",
        changes: &[
            (
                "            let (bucket, rank) = self.reports.folded;\n",
                "            let nth = self.reports.folded.0 * ranks + self.reports.folded.1;\n            let (bucket, rank) = (nth % buckets, nth / buckets);\n",
            ),
            (
                "self.reports.folded = if rank + 1 == ranks { (bucket + 1, 0) } else { (bucket, rank + 1) };",
                "self.reports.folded = ((nth + 1) / ranks, (nth + 1) % ranks);",
            ),
        ],
    },
    Mutant {
        name: "no wait before gradients are overwritten",
        changes: &[
            (
                "self.gradients.pieces_summed < needed || !self.context.progress.all_pulled(needed) {\n",
                "self.gradients.pieces_summed < needed {\n",
            ),
            (
                "        local_ranks.try_for_each(|mate| dev.wait_for(Stream::Compute, mate, self.peers[mate].pulled[piece]))?;\n",
                "        local_ranks.next();\n",
            ),
        ],
    },
    Mutant {
        name: "gradients are overwritten when the bucket before is summed",
        changes: &[(
            "dev.wait(Stream::Compute, self.gradients.summed[piece])?",
            "dev.wait(Stream::Compute, self.gradients.summed[piece.saturating_sub(1)])?",
        )],
    },
    Mutant {
        name: "sums begin with the own part",
        changes: &[(
            "        addition.add(dev, Stream::Reduce, (round * count",
            "        parts[..count].rotate_left(own % count);\n        addition.add(dev, Stream::Reduce, (round * count",
        )],
    },
    Mutant {
        name: "ranks see two verdicts",
        changes: &[(
            "        let outcome = self.context.progress.outcome(step)?;\n",
            "        let mut outcome = self.context.progress.outcome(step)?;\n        outcome.norm_sq *= 1.0 + self.context.rank as f64;\n",
        )],
    },
    Mutant {
        name: "weights are pulled before they have come to who carries them",
        changes: &[("if relay == owner { peer.stepped[bucket] } else { peer.relayed[bucket] }", "peer.stepped[bucket]")],
    },
    Mutant {
        name: "weights of another process are swapped into flat places, whoever keeps them",
        changes: &[(
            "memory.weights_within(slices, rank, bucket, flat)",
            "RankMemory { shards: Default::default(), ..memory.clone() }.weights_within(slices, rank, bucket, flat)",
        )],
    },
    Mutant {
        name: "a fetch overwrites what others still pull",
        changes: &[("            dev.wait_for(stream, mate, self.peers[mate].fetched)?;\n", "            let _ = mate;\n")],
    },
    Mutant {
        name: "a module is pulled before its slices have come from other processes",
        changes: &[("Ok(self.context.progress.all_fetched(2 * self.weights.fetches - 1))", "Ok(true)")],
    },
    Mutant {
        name: "a swap overwrites what is not summed",
        changes: &[("        dev.wait(Stream::Compute, free)?;\n", "        let _ = free;\n")],
    },
    Mutant {
        name: "a group leaves before it is summed",
        changes: &[
            ("            self.group_written(dev, grads, next + 1)?;\n", ""),
            (
                "        self.group_written(dev, grads, self.gradients.pieces_written)?;\n",
                "        self.group_written(dev, grads, self.gradients.pieces_swapped)?;\n",
            ),
        ],
    },
    Mutant {
        name: "sums of groups are added as shares are",
        changes: &[(
            "if self.gradients.is_grouped { self.gradients.addition.of_groups() } else { self.gradients.addition }",
            "self.gradients.addition",
        )],
    },
];

impl Mutant {
    /// The mutated sources, in the order of [`FILES`].
    ///
    /// # Panics
    /// If the sources have changed since the mutant was written.
    fn of(&self, mut texts: Vec<String>) -> Vec<String> {
        for (from, to) in self.changes {
            let found: usize = texts.iter().map(|text| text.matches(from).count()).sum();
            assert_eq!(found, 1, "{}: {FILES:?} do not have this once: {from}", self.name);
            texts.iter_mut().for_each(|text| *text = text.replace(from, to));
        }
        texts
    }
}

/// The content of [`FILES`] below `root`.
fn texts(root: &Path) -> Vec<String> {
    FILES.map(|file| fs::read_to_string(root.join(file)).unwrap()).to_vec()
}

fn sources() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn every_mutant_is_a_mistake_of_the_sources_as_they_are() {
    let texts = texts(sources());
    assert!(MUTANTS.iter().all(|mutant| mutant.of(texts.clone()) != texts));
}

#[test]
#[ignore = "a build for each mutant: minutes in all"]
fn every_mutant_is_noticed() {
    let copy = copy_of_the_sources();
    let texts = texts(&copy);
    assert_eq!(passed(&copy), Some(true), "the sources as they are");
    let is_red = |mutant: &Mutant| {
        let mistaken = mutant.of(texts.clone());
        FILES.iter().zip(mistaken).for_each(|(file, text)| fs::write(copy.join(file), text).unwrap());
        let is_red = passed(&copy) == Some(false);
        record("ranks_mutants", json!({"mutant": mutant.name, "tests": TESTS[3..], "red": is_red}));
        is_red
    };
    let unnoticed: Vec<_> = MUTANTS.iter().filter(|mutant| !is_red(mutant)).map(|mutant| mutant.name).collect();
    assert_eq!(unnoticed, [""; 0], "green, or they do not compile");
}

/// Copies all files that git tracks or would track into the target directory. Builds of later mutants reuse earlier ones.
fn copy_of_the_sources() -> PathBuf {
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ranks-mutants");
    let listed = Command::new("git").args(["ls-files", "-coz", "--exclude-standard"]).current_dir(sources()).output().unwrap();
    for file in String::from_utf8(listed.stdout).unwrap().split('\0').filter(|file| !file.is_empty()) {
        let (from, to) = (sources().join(file), copy.join(file));
        let Ok(bytes) = fs::read(&from) else { continue };
        if fs::read(&to).ok().as_ref() != Some(&bytes) {
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::write(to, bytes).unwrap();
        }
    }
    copy
}

/// Whether the tests pass in the copy; `None` if they do not compile. The build is incremental and without optimization, because the tests
/// take only seconds anyway.
fn passed(copy: &Path) -> Option<bool> {
    let cargo = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO"));
        command.args(args).current_dir(copy).env("CARGO_TARGET_DIR", copy.join("target"));
        command.env("CARGO_INCREMENTAL", "1").env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
        command.output().unwrap().status.success()
    };
    cargo(&["test", "--lib", "--no-run"]).then(|| cargo(&TESTS))
}
