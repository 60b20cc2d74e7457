//! Measures the error of an algebraic rollback: it compares Adam's state after a step and its inverse with the state before, bit by bit.
//!
//! The paper rolls speculation back in place with the inverse of the step. This engine writes no state before the verdict, so its rollback
//! is exact. The program prints one JSON line per case to stdout and a table to stderr.

use clap::Parser;
use half::bf16;
use microbench::facts::Facts;
use microbench::values;
use serde_json::{Value, json};
use std::fmt;
use superoffload::Result;
use superoffload::internals::hardware::Topology;
use superoffload::internals::optim::{AdamConsts, AdamHyper, AdamKernels, AdamState, AdamStep, Grads, Isa, Weights};

/// Measures the error of the algebraic rollback.
#[derive(Parser, serde::Serialize)]
struct Options {
    /// Parameters.
    #[arg(long, value_name = "N", default_value_t = 1 << 20)]
    params: usize,
    /// Steps before the rollback: m and v settle.
    #[arg(long, value_name = "N", default_value_t = 300)]
    steps: u64,
}

/// Magnitude of a usual gradient.
const GRADIENT: f32 = 1e-3;

/// A sequence of steps and rollbacks.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    /// One gradient in `every` is multiplied by `factor`.
    factor: f32,
    every: usize,
    /// Number of steps and rollbacks, one after the other.
    rollbacks: u64,
}

const CASES: [Case; 6] = [
    Case { name: "a usual gradient", factor: 1.0, every: 1, rollbacks: 1 },
    Case { name: "ten rollbacks in a row", factor: 1.0, every: 1, rollbacks: 10 },
    Case { name: "1000 times as large", factor: 1e3, every: 1, rollbacks: 1 },
    Case { name: "a million times as large", factor: 1e6, every: 1, rollbacks: 1 },
    Case { name: "infinite in one of 1000", factor: f32::INFINITY, every: 1000, rollbacks: 1 },
    Case { name: "NaN in one of 1000", factor: f32::NAN, every: 1000, rollbacks: 1 },
];

/// Adam's state in fp32.
#[derive(Clone)]
struct State([Vec<f32>; 3]);

impl State {
    fn new(params: usize) -> Self {
        Self([values(1, params).into_iter().map(|x| 0.05 * x).collect(), vec![0.0; params], vec![0.0; params]])
    }

    fn adam(&mut self) -> AdamState<'_> {
        let [params, m, v] = &mut self.0;
        AdamState { first: 0, params, m, v }
    }
}

/// Difference between one array after the rollback and before the step.
struct Loss {
    /// Fraction of elements with other bits.
    differing: f64,
    /// Largest relative error of the elements that are still finite.
    worst: f64,
    /// Number of elements that are no longer finite.
    lost: usize,
}

impl Loss {
    fn new(before: &[f32], after: &[f32]) -> Self {
        let pairs = || before.iter().zip(after);
        let relative = |(before, after): (&f32, &f32)| (f64::from(*after) - f64::from(*before)).abs() / f64::from(*before).abs();
        Self {
            differing: pairs().filter(|(a, b)| a.to_bits() != b.to_bits()).count() as f64 / before.len() as f64,
            worst: pairs().filter(|(a, b)| **a != 0.0 && b.is_finite()).map(relative).fold(0.0, f64::max),
            lost: after.iter().filter(|x| !x.is_finite()).count(),
        }
    }

    fn json(&self) -> Value {
        json!({ "differing_share": self.differing, "worst_relative": self.worst, "not_finite": self.lost })
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>8.3} % {:>9.1e} {:>6}", 100.0 * self.differing, self.worst, self.lost)
    }
}

/// Takes steps with `kernels` at a constant learning rate.
struct Run {
    kernels: AdamKernels,
    out: Vec<bf16>,
}

impl Run {
    fn step(number: u64) -> AdamStep {
        let hyper = AdamHyper { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        AdamStep { consts: AdamConsts::new(&hyper, number, true), scale: 1.0 }
    }

    fn gradients(number: u64, case: Case, params: usize) -> Vec<bf16> {
        let factor = |i: usize| if i.is_multiple_of(case.every) { case.factor } else { 1.0 };
        values(10 + number as u32, params).into_iter().enumerate().map(|(i, x)| bf16::from_f32(x * GRADIENT * factor(i))).collect()
    }

    fn forward(&mut self, number: u64, state: &mut State, grads: &[bf16]) {
        self.kernels.step(Self::step(number), &mut state.adam(), Grads::Bf16(grads), Weights::Bf16(&mut self.out));
    }

    /// Returns the state after the steps of `case` and their rollbacks.
    fn rolled_back(&mut self, number: u64, before: &State, case: Case) -> State {
        let mut state = before.clone();
        for at in number..number + case.rollbacks {
            let grads = Self::gradients(at, case, self.out.len());
            self.forward(number, &mut state, &grads);
            self.kernels.inverse(Self::step(number), &mut state.adam(), Grads::Bf16(&grads));
        }
        state
    }
}

fn start(options: &Options) -> Result<()> {
    let mut run = Run { kernels: AdamKernels::new(Isa::detect())?, out: vec![bf16::ZERO; options.params] };
    let mut settled = State::new(options.params);
    for number in 1..=options.steps {
        run.forward(number, &mut settled, &Run::gradients(number, CASES[0], options.params));
    }
    let facts = Facts::new("inverse_error", &Topology::this_machine(), options);
    let mut table = vec![format!("{:<26} {:>27} {:>27} {:>27}", "rolled back", "params", "m", "v")];
    for case in CASES {
        let after = run.rolled_back(options.steps + 1, &settled, case);
        let [params, m, v] = [0, 1, 2].map(|i| Loss::new(&settled.0[i], &after.0[i]));
        let fields = json!({ "params": params.json(), "m": m.json(), "v": v.json() });
        println!(
            "{}",
            facts.line(json!({ "case": case.name, "factor": case.factor.to_string(), "one_in": case.every,
                "rollbacks": case.rollbacks, "params": options.params, "steps": options.steps, "loss": fields }))
        );
        table.push(format!("{:<26} {params} {m} {v}", case.name));
    }
    eprintln!("\nother bits, worst relative error, not finite\n{}", table.join("\n"));
    Ok(())
}

fn main() -> std::process::ExitCode {
    microbench::exit_code(start(&Options::parse()))
}
