use super::record::{CPU_SUM_BLOCK, HEAD_ROWS, LOGITS_DTYPE, LONG_SUMS, MATMUL, STEP, TOKEN_LOGPS};
use super::*;
use crate::data::rows::hold_out::EvalSplit;
use crate::objective::tests::{DPO, policy};
use crate::policy_loss::{PolicyLoss, PolicyLossKind};
use serde_json::{Map, Value, json};

/// The recipe of a small run.
pub(crate) fn recipe() -> Recipe {
    let numerics = Numerics {
        dtype: Dtype::Bfloat16,
        logits_dtype: Dtype::Bfloat16,
        fp8: false,
        moments: Moments::Float32,
        attention: Attention::Plain,
        experts: ExpertProducts::Own,
        long_sums: LongSums::Library,
        head_rows: HeadRows::All,
        loss_tile: LossTile { rows: 8, vocab: 9, tail: 0 },
        attention_block: None,
        mlp_tile: None,
        device: DeviceKind::Cpu,
        sum_block: Some(128),
        inverse_rollback: false,
    };
    Recipe {
        model: Arc::new(ModelShape::demo()),
        rows: RowOrder { packing: Packing::Wrapped, overlong: Overlong::Auto, pair_length: None, held_out: None, shuffled: true, seed: 42 },
        step: StepShape { micro_batch: 2, seq_length: 16, micro_batches: 4, shares: 2, group: 1, sequence_ranks: 1 },
        numerics,
        objective: None,
        optimizer: AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
        schedule: Schedule { length: TrainLength::Steps(9), scheduler: LrScheduler::Linear, warmup_steps: 0, warmup_ratio: 0.1 },
        max_grad_norm: 1.0,
        router_aux_loss_coef: 0.0,
        inject: Vec::new(),
    }
}

/// A change of each field.
const CHANGES: [fn(&mut Recipe); 36] = [
    |r| r.rows.pair_length = Some(8),
    |r| r.objective = Some(DPO),
    |r| r.model = Arc::new(ModelShape::demo().with_layers(1)),
    |r| r.rows.packing = Packing::Bfd,
    |r| r.rows.overlong = Overlong::Drop,
    |r| r.rows.held_out = Some(EvalSplit::Documents(3)),
    |r| r.rows.shuffled = false,
    |r| r.rows.seed = 1,
    |r| r.step.micro_batch = 3,
    |r| r.step.seq_length = 32,
    |r| r.step.micro_batches = 8,
    |r| r.step.shares = 4,
    |r| r.step.group = 2,
    |r| r.step.sequence_ranks = 2,
    |r| r.numerics.dtype = Dtype::Float16,
    |r| r.numerics.logits_dtype = Dtype::Float32,
    |r| r.numerics.fp8 = true,
    |r| r.numerics.moments = Moments::Bfloat16,
    |r| r.numerics.attention = Attention::Cudnn { deterministic: true },
    |r| r.numerics.experts = ExpertProducts::Cublaslt,
    |r| r.numerics.long_sums = LongSums::Slices,
    |r| r.numerics.head_rows = HeadRows::Trained,
    |r| r.numerics.loss_tile.rows = 4,
    |r| r.numerics.attention_block = Some(64),
    |r| r.numerics.mlp_tile = Some(64),
    |r| r.numerics.device = DeviceKind::Gpu,
    |r| r.numerics.sum_block = None,
    |r| r.numerics.inverse_rollback = true,
    |r| r.optimizer.beta2 = 0.5,
    |r| r.schedule.length = TrainLength::Epochs(3.0),
    |r| r.schedule.scheduler = LrScheduler::Cosine,
    |r| r.schedule.warmup_steps = 3,
    |r| r.schedule.warmup_ratio = 0.5,
    |r| r.max_grad_norm = 0.0,
    |r| r.router_aux_loss_coef = 0.01,
    |r| r.inject = vec![Injection { step: 1, element: 2, share: 0, value: 3.0 }],
];

#[test]
fn each_changed_field_is_one_difference_and_another_fact() {
    let was = recipe();
    assert_eq!(was.differences(&was), []);
    let mut names = Vec::new();
    for change in CHANGES {
        let mut is = recipe();
        change(&mut is);
        let [difference] = &was.differences(&is)[..] else { panic!("{:?}", was.differences(&is)) };
        assert!(difference.was != difference.is && !names.contains(&difference.name), "{difference:?}");
        names.push(difference.name);
        let differing = was.facts().into_iter().zip(is.facts()).filter(|(was, is)| was != is);
        assert_eq!(differing.count(), 1, "{}", difference.name);
    }
    assert_eq!(names.len(), was.fields().len(), "a field without a change in this test");
}

#[test]
fn facts_are_titles_with_words() {
    let facts = recipe().facts();
    let text = |title: &str| facts.iter().find(|(name, _)| *name == title).unwrap().1.as_str();
    assert_eq!(text("loss tile"), "8 x 9");
    assert_eq!(text("gradient shares"), "2 of 4 micro-batches, in groups of 1");
    assert_eq!((text("micro-batch"), text("formats")), ("2 x 16", "bfloat16, moments in float32"));
    let mut titles: Vec<_> = facts.iter().map(|(title, _)| title).collect();
    titles.sort_unstable();
    titles.dedup();
    assert_eq!(titles.len(), facts.len());
}

/// Checkpoints hold these keys in this order.
#[test]
fn the_record_of_checkpoints_is_stable() {
    let mut run = Map::new();
    run.insert("model".into(), json!({}));
    let mut recipe = recipe();
    recipe.numerics.attention_block = Some(4096);
    recipe.record(&mut run);
    let text = concat!(
        r#"{"model":{},"numerics":{"loss_tile":{"rows":8,"vocab":9},"attention":"plain","expert_products":"own","#,
        r#""long_sums":"library","head_rows":"all","logits_dtype":"bfloat16","attention_block":[4096,4096],"mlp_tile":null,"#,
        r#""computed_on":"cpu","cpu_sum_block":128,"#,
        r#""matmul":"in the format of weights","#,
        r#""sequence_ranks":1,"gradient_group":1,"pair_loss":null},"moments":"float32","step":{"micro_batches":4,"gradient_shares":2}}"#,
    );
    assert_eq!(serde_json::to_string(&run).unwrap(), text);
}

/// The block decides the bits of attention by products, so that a run does not go on from one with another block.
#[test]
fn attention_by_products_is_recorded_with_its_block() {
    let recorded = |attention| {
        let mut recipe = recipe();
        recipe.numerics.attention = attention;
        let mut run = Map::new();
        recipe.record(&mut run);
        run["numerics"]["attention"].as_str().unwrap().to_string()
    };
    assert_eq!(recorded(Attention::Products), "products of 1024 queries");
    let both = |deterministic| recorded(Attention::CudnnOrProducts { deterministic });
    assert_eq!([both(true), both(false)], ["cudnn or products of 1024 queries", "cudnn or products of 1024 queries, nondeterministic"]);
}

#[test]
fn older_records_are_completed_and_missing_parts_stay_missing() {
    let then = json!({"numerics": {"attention": "cudnn"}}).as_object().unwrap().clone();
    let whole = recipe().complete(then);
    assert_eq!((&whole["numerics"]["attention"], &whole["numerics"][MATMUL]), (&json!("cudnn"), &json!("in the format of weights")));
    assert_eq!(whole["numerics"][LONG_SUMS], json!("library"));
    assert_eq!(whole["numerics"][HEAD_ROWS], json!("all"));
    assert_eq!(whole["numerics"][LOGITS_DTYPE], json!("bfloat16"), "the format of the weights");
    assert_eq!(whole["numerics"].get(CPU_SUM_BLOCK), Some(&Value::Null), "sums in one chain");
    assert_eq!((&whole["moments"], whole.get(STEP)), (&json!("float32"), None));
    assert_eq!(recipe().complete(Map::new()).get("numerics"), None::<&Value>);
}

#[test]
fn a_loss_with_a_reference_of_tokens_does_not_go_on_from_unrounded_log_probabilities() {
    let formats = |beta| {
        let Objective::Policy(loss) = policy(PolicyLossKind::Dapo) else { unreachable!("a loss of completions") };
        let (recipe, mut now) = (Recipe { objective: Some(Objective::Policy(PolicyLoss { beta, ..loss })), ..recipe() }, Map::new());
        recipe.record(&mut now);
        let then = recipe.complete(json!({"numerics": {}}).as_object().unwrap().clone());
        [then, now].map(|run| run["numerics"].get(TOKEN_LOGPS).cloned())
    };
    assert_eq!(formats(0.1), [Some(json!("float64")), Some(json!("float32"))]);
    assert_eq!(formats(0.0), [None, None]);
}
