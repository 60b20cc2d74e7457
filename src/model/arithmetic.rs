//! The properties of a shape that affect arithmetic. Checkpoints record them, so that a run cannot resume with a different model unnoticed.

use super::layer_shape::{Act, Attn, AttnKind, Ffn, Join, Latent, LayerShape, Moe, NormKind, NormSpec, QkSpan, SharedExpertShape, Values};
use super::shape::{ModelShape, RopeScaling};
use crate::device::{ExpertActivation, RouterRule, SigmoidRule};
use serde_json::{Map, Value, json};

impl ModelShape {
    /// Every field that changes arithmetic, with its name in `config.json` if it has one. All models have the same fields, with `null` for
    /// fields that do not apply. Names, formats and fields that affect only random initialization are omitted.
    pub(crate) fn arithmetic(&self) -> Map<String, Value> {
        // Without `..`, so that a new field requires a decision here.
        let Self {
            family: _,
            vocab,
            channels,
            max_positions,
            learned_positions,
            // The factor is 1 in every sequence that is accepted.
            scales_queries: _,
            embed_scale,
            logit_scale,
            logit_softcap,
            ropes: _,
            layers,
            final_norm: _,
            tied,
            init_std: _,
            ignored_dropout: _,
            media_tokens: _,
            // Checkpoints list frozen tensors and trained tokens.
            frozen: _,
            trained_tokens: _,
            // Expansion is exact.
            packs_experts: _,
        } = self;
        let fields = [
            ("vocab_size", json!(vocab)),
            ("hidden_size", json!(channels)),
            ("num_hidden_layers", json!(layers.len())),
            ("learned_positions", json!(learned_positions.then_some(max_positions))),
            ("tie_word_embeddings", json!(tied)),
            ("embedding_scale", shortest(embed_scale.factor)),
            ("embedding_scale_rounded", json!(embed_scale.rounded)),
            ("logit_scale", shortest(*logit_scale)),
            ("logit_softcap", json!(logit_softcap.map(shortest))),
        ];
        let mut record: Map<String, Value> = fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        record.extend(joined(&layers.iter().map(|layer| self.layer_arithmetic(layer)).collect::<Vec<_>>()));
        record.insert("sliding_windows".into(), layers.iter().map(|layer| json!(layer.attn.window)).collect());
        record
    }

    fn layer_arithmetic(&self, layer: &LayerShape) -> Vec<(&'static str, Value)> {
        let LayerShape { attn, mlp, norm: NormSpec { kind: norm, plus_one, eps }, pre_norm, join, scaled } = *layer;
        let Ffn { width, act, bias } = mlp.ffn();
        let Attn { kind, heads, kv_heads, head_dim, qkv_bias, out_bias, qk_norm, values, rope, window: _, scale, softcap, sinks } = attn;
        let rope = rope.map(|rope| &self.ropes[rope]);
        vec![
            ("num_attention_heads", json!(heads)),
            ("num_key_value_heads", json!(kv_heads)),
            ("head_dim", json!(head_dim)),
            ("intermediate_size", json!(width)),
            ("norm", norm_name(norm).into()),
            ("norm_eps", shortest(eps)),
            ("norm_plus_one", json!(plus_one)),
            ("pre_norm", json!(pre_norm)),
            ("join", join_name(join, scaled)),
            ("mlp", act_name(act).into()),
            ("rope_theta", json!(rope.map(|rope| rope.theta))),
            ("rotary_dim", json!(rope.map(|rope| rope.rotary_dim))),
            ("rope_interleaved", json!(rope.map(|rope| rope.interleaved))),
            ("rope_scaling", rope.map_or(Value::Null, |rope| scaling(&rope.scaling))),
            ("rope_attention_factor", rope.map_or(Value::Null, |rope| shortest(rope.attention_factor))),
            ("qkv_bias", json!(qkv_bias)),
            ("attention_out_bias", json!(out_bias)),
            ("mlp_bias", json!(bias)),
            ("qk_norm", span(qk_norm)),
            ("experts", mlp.moe().map_or(Value::Null, experts)),
            ("attention_scale", shortest(scale)),
            ("attention_softcap", json!(softcap.map(shortest))),
            ("attention_sinks", json!(sinks)),
            ("attention", attn_name(kind, values)),
        ]
    }
}

/// Joins the fields of all layers: one value if all layers agree, otherwise a list.
fn joined(layers: &[Vec<(&'static str, Value)>]) -> impl Iterator<Item = (String, Value)> {
    let values = |field: usize| layers.iter().map(move |layer| layer[field].1.clone());
    let one =
        move |field: usize, first: &Value| if values(field).all(|value| value == *first) { first.clone() } else { values(field).collect() };
    layers[0].iter().enumerate().map(move |(field, (name, first))| (name.to_string(), one(field, first)))
}

fn norm_name(norm: NormKind) -> &'static str {
    match norm {
        NormKind::Rms => "rms",
        NormKind::Layer => "layer",
    }
}

fn attn_name(kind: AttnKind, values: Values) -> Value {
    let kind = match kind {
        AttnKind::Latent(Latent { query_rank, rank, rotary, value }) => {
            return json!({"kind": "latent", "query_rank": query_rank, "rank": rank, "rotary": rotary, "value": value});
        }
        AttnKind::Softmax => "softmax",
        AttnKind::GatedSoftmax => "gated softmax",
        AttnKind::Delta => "gated delta rule",
    };
    match values {
        Values::Projected => json!(kind),
        Values::Normed => json!({"kind": kind, "values": "normed"}),
        Values::NormedKeys => json!({"kind": kind, "values": "normed keys"}),
    }
}

/// A factor of the files on the stream after the layer is recorded only where there is one, so that older records stay equal.
fn join_name(join: Join, scaled: bool) -> Value {
    let join = match join {
        Join::Add => json!("add"),
        Join::Scale(factor) => json!({"scale": shortest(factor)}),
        Join::Norm => json!("norm"),
    };
    if scaled { json!([join, "scaled by the files"]) } else { join }
}

fn act_name(act: Act) -> &'static str {
    match act {
        Act::Swiglu => "swiglu",
        Act::Geglu => "geglu",
        Act::GeluTanh => "gelu_tanh",
    }
}

/// The span of the norm. A span of one head is `true`, for compatibility with older checkpoints, which stored a flag.
fn span(qk_norm: Option<QkSpan>) -> Value {
    match qk_norm {
        None => json!(false),
        Some(QkSpan::Head) => json!(true),
        Some(QkSpan::Whole) => json!("whole"),
    }
}

/// Components that most models lack are recorded only where they are, so that records of older checkpoints stay equal.
fn experts(Moe { experts, top_k, ffn: _, activation, rule, router_bias, corrected, shared, own_norms }: Moe) -> Value {
    let rule = match rule {
        RouterRule::Chosen => json!("softmax of the chosen"),
        RouterRule::All => json!("softmax of all"),
        RouterRule::Sigmoid(SigmoidRule { groups, top_groups, renormalised, scale }) => {
            json!({"sigmoid": {"groups": [top_groups, groups], "sum_to_one": renormalised, "scale": shortest(scale)}})
        }
    };
    let clamped = match activation {
        ExpertActivation::Swiglu | ExpertActivation::Geglu => Value::Null,
        ExpertActivation::Clamped { alpha, limit } => json!({"alpha": shortest(alpha), "limit": shortest(limit)}),
    };
    let mut record = json!({"count": experts, "per_token": top_k, "weights": rule, "clamped": clamped, "router_bias": router_bias});
    if corrected {
        record["corrected"] = json!(true);
    }
    if let Some(SharedExpertShape { width, gated }) = shared {
        record["shared"] = json!({"width": width, "gated": gated});
    }
    if own_norms {
        record["own_norms"] = json!(true);
    }
    record
}

fn scaling(scaling: &RopeScaling) -> Value {
    match scaling {
        RopeScaling::Default => json!("none"),
        RopeScaling::Proportional { pairs } => json!({"proportional": pairs}),
        RopeScaling::Linear { factor } => json!({"linear": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            json!({"llama3": [factor, low_freq_factor, high_freq_factor, original_max_positions]})
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_max_positions } => {
            json!({"yarn": [factor, beta_fast, beta_slow, truncate, original_max_positions]})
        }
        RopeScaling::Long { short, long, original_max_positions } => json!({"longrope": [short, long, original_max_positions]}),
        RopeScaling::Dynamic { factor, max_positions } => json!({"dynamic": [factor, max_positions]}),
    }
}

/// The number with the fewest digits that parses to `x`: 1e-5, not 0.000009999999747378752.
fn shortest(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

#[cfg(test)]
mod tests {
    use super::super::layer_shape::Mlp;
    use super::*;

    fn changed(change: impl FnOnce(&mut ModelShape)) -> Vec<String> {
        let (before, mut shape) = (ModelShape::demo().arithmetic(), ModelShape::demo());
        change(&mut shape);
        let after = shape.arithmetic();
        assert!(before.keys().eq(after.keys()), "the same fields for every model");
        before.into_iter().filter(|(key, value)| after[key] != *value).map(|(key, _)| key).collect()
    }

    fn all(change: impl Fn(&mut LayerShape)) -> Vec<String> {
        changed(|shape| shape.layers.iter_mut().for_each(&change))
    }

    #[test]
    fn the_record_changes_with_arithmetic_and_with_nothing_else() {
        let llama3 = |factor| RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 64 };
        assert_eq!(all(|l| l.norm.eps = 0.5), ["norm_eps"]);
        assert_eq!(changed(|s| s.layers[1].norm.eps = f32::from_bits(s.layers[1].norm.eps.to_bits() + 1)), ["norm_eps"]);
        assert_eq!(all(|l| l.attn.scale *= 2.0), ["attention_scale"]);
        assert_eq!(changed(|s| s.layers[2].attn.window = Some(7)), ["sliding_windows"]);
        assert_eq!(changed(|s| s.ropes[0].scaling = RopeScaling::Linear { factor: 2.0 }), ["rope_scaling"]);
        assert_eq!(changed(|s| s.ropes[0].scaling = llama3(8.0)), ["rope_scaling"]);
        assert_eq!(all(|l| l.norm.kind = NormKind::Layer), ["norm"]);
        let dense = |l: &LayerShape| l.mlp.ffn();
        assert_eq!(all(|l| l.mlp = Mlp::Dense(Ffn { act: Act::GeluTanh, ..dense(l) })), ["mlp"]);
        let plain = |rule, l: &LayerShape| Moe {
            experts: 4,
            top_k: 2,
            ffn: dense(l),
            activation: ExpertActivation::Swiglu,
            rule,
            router_bias: false,
            corrected: false,
            shared: None,
            own_norms: false,
        };
        assert_eq!(all(|l| l.mlp = Mlp::Moe(plain(RouterRule::All, l))), ["experts"]);
        assert_eq!(all(|l| l.attn.sinks = true), ["attention_sinks"]);
        assert_eq!(all(|l| l.attn.kind = AttnKind::GatedSoftmax), ["attention"]);
        assert_eq!(changed(|s| s.layers[1].attn.kind = AttnKind::Delta), ["attention"]);
        let latent = Latent { query_rank: None, rank: 8, rotary: 4, value: 6 };
        assert_eq!(all(|l| l.attn.kind = AttnKind::Latent(latent)), ["attention"]);
        let record = |latent| attn_name(AttnKind::Latent(latent), Values::Projected);
        let others = [
            Latent { query_rank: Some(8), ..latent },
            Latent { rank: 9, ..latent },
            Latent { rotary: 2, ..latent },
            Latent { value: 5, ..latent },
        ];
        assert!(others.into_iter().all(|other| record(other) != record(latent)));
        let moe = plain(RouterRule::All, &ModelShape::demo().layers[0]);
        let clamped = ExpertActivation::Clamped { alpha: 1.0, limit: 2.0 };
        let others = [
            Moe { rule: RouterRule::Chosen, ..moe },
            Moe { activation: clamped, ..moe },
            Moe { router_bias: true, ..moe },
            Moe { corrected: true, ..moe },
            Moe { own_norms: true, ..moe },
            Moe { shared: Some(SharedExpertShape { width: 8, gated: false }), ..moe },
            Moe { rule: RouterRule::Sigmoid(SigmoidRule::GATE), ..moe },
            Moe { top_k: 3, ..moe },
            Moe { experts: 5, ..moe },
        ];
        assert!(others.into_iter().all(|other| experts(other) != experts(moe)));
        assert_eq!(all(|l| l.attn.qk_norm = Some(QkSpan::Head)), ["qk_norm"]);
        assert_eq!(all(|l| l.attn.qk_norm = Some(QkSpan::Whole)), ["qk_norm"]);
        assert_eq!(all(|l| l.attn.values = Values::Normed), ["attention"]);
        assert_eq!(all(|l| l.scaled = true), ["join"]);
        assert_eq!(all(|l| l.join = Join::Scale(0.5)), ["join"]);
        assert_eq!(all(|l| l.pre_norm = false), ["pre_norm"]);
        assert_eq!(changed(|s| s.logit_scale = 0.5), ["logit_scale"]);
        assert_eq!(changed(|s| s.embed_scale.factor = 0.5), ["embedding_scale"]);
        assert_eq!(changed(|s| s.ropes[0].interleaved = true), ["rope_interleaved"]);
        assert_eq!(changed(|s| s.logit_softcap = Some(30.0)), ["logit_softcap"]);
        assert_eq!(all(|l| l.attn.softcap = Some(50.0)), ["attention_softcap"]);
        assert_eq!(all(|l| l.norm.plus_one = true), ["norm_plus_one"]);
        assert_eq!(changed(|s| s.tied = false), ["tie_word_embeddings"]);
        assert_eq!(all(|l| l.attn.rope = None), ["rope_theta", "rotary_dim", "rope_interleaved", "rope_scaling", "rope_attention_factor"]);
        assert_eq!(changed(|s| s.learned_positions = true), ["learned_positions"]);
        assert_eq!(changed(|s| s.init_std = 1.0), [""; 0]);
        assert_eq!(changed(|s| s.max_positions = 9), [""; 0], "only a limit where positions rotate");
        assert_eq!(changed(|s| s.ignored_dropout.push("attention_dropout = 0.1".into())), [""; 0]);
    }

    #[test]
    fn layers_that_differ_are_listed() {
        let mut shape = ModelShape::demo().with_layers(2);
        shape.layers[1].attn.rope = None;
        assert_eq!(shape.arithmetic()["rotary_dim"], json!([32, null]));
    }

    #[test]
    fn numbers_are_written_in_common_notation() {
        assert_eq!(ModelShape::demo().arithmetic()["norm_eps"].to_string(), "0.00001");
        assert_eq!(shortest(0.1).to_string(), "0.1");
    }
}
