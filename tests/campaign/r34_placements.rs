//! R34: equal bits by all placements of a recipe.

use crate::harness::*;
use crate::recipes::{Placement, Recipe, placements, recipes};
use proptest::collection::vec;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use rand_chacha::rand_core::Rng;
use serde_json::json;
use std::cell::Cell;
use std::net::TcpListener;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R34",
    what: "random recipes (family, format, cut of a step, clipping, data, injected gradients), each by up to 8 random placements (buckets, tiers, \
           slots, weights, activations, techniques, threads, ranks, processes, changes of plan, orders of an adversary), in pairs: one digest",
    runs: 1250,
    smoke: 50,
    start,
};

/// Steps of every run.
const STEPS: [&str; 2] = ["--max-steps=3", "--report-to=none"];
/// Most recipes that a run draws until two placements of one are allowed.
const DRAWS_MAX: u32 = 60;
/// Most attempts to make a failing case simpler.
const SHRINKS_MAX: u32 = 200;
/// Concurrent runs.
const AT_ONCE: usize = 2;

fn start(harness: &Harness) -> Result<Trial, String> {
    expect(harness.has_flag("--processes"), || "this program has no --processes".into())?;
    let document = |nth: usize| format!("{}\n", json!({"text": "one of several documents. ".repeat(1 + nth % 3)}));
    harness.write("documents.jsonl", (0..200).map(document).collect::<String>());
    Ok(Box::new(|harness, turn| {
        let mut seed = [0; 32];
        turn.rng.fill_bytes(&mut seed);
        let config = Config {
            cases: 1,
            failure_persistence: None,
            max_global_rejects: DRAWS_MAX,
            max_shrink_iters: SHRINKS_MAX,
            ..Config::default()
        };
        let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
        let (family, pairs) = (Cell::new(""), Cell::new(0));
        let outcome = runner.run(&(recipes(), vec(placements(), 2..=8)), |(recipe, placements)| {
            family.set(recipe.family);
            pairs.set(compare(harness, &recipe, &placements)?);
            Ok(())
        });
        (turn.kind, turn.tries) = (family.get().into(), pairs.get().max(1));
        outcome.map_err(|error| match error {
            TestError::Fail(why, (recipe, _)) => format!("{why}\n    {}", recipe.inputs()),
            TestError::Abort(why) => format!("no two placements of {DRAWS_MAX} recipes were allowed: {why}"),
        })
    }))
}

/// Runs a recipe by each placement that the plan allows. All digests must equal the first. Returns the number of pairs that this compares.
/// Rejects a recipe with fewer than two such placements.
fn compare(harness: &Harness, recipe: &Recipe, placements: &[Placement]) -> Result<u64, TestCaseError> {
    harness.write("recipe/config.json", recipe.config());
    harness.settings("recipe.toml", "recipe", recipe.data, recipe.injection);
    let mut digests: Vec<(&Placement, String)> = Vec::new();
    for some in placements.chunks(AT_ONCE) {
        let run = |(nth, placement)| digest(harness, recipe, placement, &format!("placement-{nth}"));
        let found: Vec<_> = std::thread::scope(|scope| {
            let runs: Vec<_> = some.iter().enumerate().map(|run_of| scope.spawn(move || run(run_of))).collect();
            runs.into_iter().map(|run| run.join().expect("a run does not panic")).collect()
        });
        for (placement, digest) in some.iter().zip(found) {
            let digest = digest.map_err(|why| TestCaseError::fail(format!("{why}\n    {}", command_line(recipe, placement))))?;
            digests.extend(digest.map(|digest| (placement, digest)));
        }
    }
    let Some((one, expected)) = digests.first() else { return Err(TestCaseError::reject("no placement is allowed")) };
    for (other, digest) in &digests {
        if digest != expected {
            let commands = [one, other].map(|placement| command_line(recipe, placement)).join("\n    ");
            return Err(TestCaseError::fail(format!("digests {expected} and {digest} of\n    {commands}")));
        }
    }
    let all = digests.len() as u64;
    if all > 1 { Ok(all * (all - 1) / 2) } else { Err(TestCaseError::reject("one placement is allowed")) }
}

/// The command of a placement, for messages.
fn command_line(recipe: &Recipe, placement: &Placement) -> String {
    let processes = recipe.devices(placement).processes;
    let flags = [&STEPS.map(String::from), &recipe.flags(placement)[..]].concat();
    format!("superoffload train --processes={processes} {}", flags.join(" "))
}

/// The digest of a run, once all its processes have ended; `None` if the plan refuses the placement.
fn digest(harness: &Harness, recipe: &Recipe, placement: &Placement, out: &str) -> Result<Option<String>, String> {
    let processes = recipe.devices(placement).processes;
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).map_err(|e| e.to_string())?.port();
    let flags = [&STEPS.map(String::from), &recipe.flags(placement)[..]].concat();
    harness.remove(out);
    let start = |process: usize| {
        let own = [format!("--processes={processes}"), format!("--process={process}"), format!("--rendezvous=127.0.0.1:{port}")];
        let own = if processes > 1 { &own[..] } else { &[] };
        let all = [&flags, own].concat();
        let mut command = harness.train_by("recipe.toml", out, &all.iter().map(String::as_str).collect::<Vec<_>>());
        command.env("SUPEROFFLOAD_RUN_TOKEN", "a token that nobody guesses");
        harness.spawn_as(command, &format!("{out}-{process}"))
    };
    let started = Vec::from_iter((0..processes).map(start));
    let outcomes: Vec<Outcome> = started.into_iter().map(Running::finish).collect();
    if let Some(refused) = outcomes.iter().find(|outcome| outcome.code == 2) {
        return refused.expect_orderly(&[2]).map(|()| None);
    }
    for outcome in &outcomes {
        outcome.expect_orderly(&[0])?;
    }
    outcomes[0].digest().map(Some)
}
