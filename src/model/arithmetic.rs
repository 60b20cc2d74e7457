//! What of a shape decides how numbers come about: recorded in checkpoints, so that nobody goes on under another model unawares.

use super::shape::{Mlp, ModelShape, NormKind, Positions, RopeScaling};
use serde_json::{Map, Value, json};

impl ModelShape {
    /// Every field that changes arithmetic, by its name in `config.json` where it has one; the same fields for every model, `null`
    /// where one does not apply. Names, formats and what only matters for random weights are left out.
    pub(crate) fn arithmetic(&self) -> Map<String, Value> {
        // Without `..`: a field that is added has to be decided on.
        let Self {
            family: _,
            vocab,
            channels,
            layers,
            heads,
            kv_heads,
            head_dim,
            ffn,
            max_positions,
            norm,
            eps,
            mlp,
            positions,
            qkv_bias,
            out_bias,
            mlp_bias,
            qk_norm,
            tied,
            windows,
            scale,
            init_std: _,
            ignored_dropout: _,
        } = self;
        let (learned, rope) = match positions {
            Positions::Learned => (Some(max_positions), None),
            Positions::Rope(rope) => (None, Some(rope)),
        };
        let fields = [
            ("vocab_size", json!(vocab)),
            ("hidden_size", json!(channels)),
            ("num_hidden_layers", json!(layers)),
            ("num_attention_heads", json!(heads)),
            ("num_key_value_heads", json!(kv_heads)),
            ("head_dim", json!(head_dim)),
            ("intermediate_size", json!(ffn)),
            ("norm", norm_name(*norm).into()),
            ("norm_eps", shortest(*eps)),
            ("mlp", mlp_name(*mlp).into()),
            ("learned_positions", json!(learned)),
            ("rope_theta", json!(rope.map(|rope| rope.theta))),
            ("rotary_dim", json!(rope.map(|rope| rope.rotary_dim))),
            ("rope_scaling", rope.map_or(Value::Null, |rope| scaling(rope.scaling))),
            ("qkv_bias", json!(qkv_bias)),
            ("attention_out_bias", json!(out_bias)),
            ("mlp_bias", json!(mlp_bias)),
            ("qk_norm", json!(qk_norm)),
            ("tie_word_embeddings", json!(tied)),
            ("sliding_windows", json!(windows)),
            ("attention_scale", shortest(*scale)),
        ];
        fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }
}

fn norm_name(norm: NormKind) -> &'static str {
    match norm {
        NormKind::Rms => "rms",
        NormKind::Layer => "layer",
    }
}

fn mlp_name(mlp: Mlp) -> &'static str {
    match mlp {
        Mlp::Swiglu => "swiglu",
        Mlp::GeluTanh => "gelu_tanh",
    }
}

fn scaling(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::Default => json!("none"),
        RopeScaling::Linear { factor } => json!({"linear": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            json!({"llama3": [factor, low_freq_factor, high_freq_factor, original_max_positions]})
        }
    }
}

/// The number with the fewest digits that reads back as `x`: 1e-5, not 0.000009999999747378752.
fn shortest(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::RopeConfig;

    fn changed(change: impl FnOnce(&mut ModelShape)) -> Vec<String> {
        let (before, mut shape) = (ModelShape::demo().arithmetic(), ModelShape::demo());
        change(&mut shape);
        let after = shape.arithmetic();
        assert!(before.keys().eq(after.keys()), "the same fields for every model");
        before.into_iter().filter(|(key, value)| after[key] != *value).map(|(key, _)| key).collect()
    }

    #[test]
    fn what_changes_arithmetic_changes_the_record_and_nothing_else_does() {
        let rope = |scaling| Positions::Rope(RopeConfig { theta: 10000.0, rotary_dim: 32, scaling });
        let llama3 = |factor| RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 64 };
        assert_eq!(changed(|s| s.eps = 0.5), ["norm_eps"]);
        assert_eq!(changed(|s| s.eps = f32::from_bits(s.eps.to_bits() + 1)), ["norm_eps"]);
        assert_eq!(changed(|s| s.scale *= 2.0), ["attention_scale"]);
        assert_eq!(changed(|s| s.windows[2] = Some(7)), ["sliding_windows"]);
        assert_eq!(changed(|s| s.positions = rope(RopeScaling::Linear { factor: 2.0 })), ["rope_scaling"]);
        assert_eq!(changed(|s| s.positions = rope(llama3(8.0))), ["rope_scaling"]);
        assert_eq!(changed(|s| s.norm = NormKind::Layer), ["norm"]);
        assert_eq!(changed(|s| s.mlp = Mlp::GeluTanh), ["mlp"]);
        assert_eq!(changed(|s| s.tied = false), ["tie_word_embeddings"]);
        assert_eq!(changed(|s| s.positions = Positions::Learned), ["learned_positions", "rope_theta", "rotary_dim", "rope_scaling"]);
        assert_eq!(changed(|s| s.init_std = 1.0), [""; 0]);
        assert_eq!(changed(|s| s.max_positions = 9), [""; 0], "only a limit where positions rotate");
        assert_eq!(changed(|s| s.ignored_dropout.push("attention_dropout = 0.1".into())), [""; 0]);
    }

    #[test]
    fn numbers_are_written_as_people_write_them() {
        assert_eq!(ModelShape::demo().arithmetic()["norm_eps"].to_string(), "0.00001");
        assert_eq!(shortest(0.1).to_string(), "0.1");
    }
}
