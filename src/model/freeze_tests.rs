use super::*;
use crate::model::tensors::FLAT_ALIGN_ELEMS;
use crate::model::tensors::tests::shape;
use proptest::prelude::*;

fn freezing(architecture: &str, freeze: &[&str], train_only: &[&str]) -> std::result::Result<ModelShape, String> {
    let [freeze, train_only] = [freeze, train_only].map(|patterns| patterns.iter().map(|pattern| pattern.to_string()).collect::<Vec<_>>());
    shape(architecture).freezing(FreezeRules { freeze: &freeze, train_only: &train_only, tokens: None }).map_err(|e| e.to_string())
}

fn frozen(architecture: &str, freeze: &[&str], train_only: &[&str]) -> Vec<String> {
    freezing(architecture, freeze, train_only).unwrap().frozen.into_iter().collect()
}

#[test]
fn expressions_choose_tensors_by_their_names_in_files() {
    let llama = |freeze: &[&str], train_only: &[&str]| frozen("LlamaForCausalLM", freeze, train_only);
    assert_eq!(llama(&["embed_tokens"], &[]), ["wte"]);
    assert_eq!(llama(&[r"^model\.layers\.1\.mlp", "norm.weight$"], &[]).len(), 2 + 5, "of either expression");
    let rest = llama(&[], &["lm_head", r"layers\.1\."]);
    assert!(rest.iter().all(|name| !name.starts_with("layers.1.") && name != "lm_head") && rest.contains(&"wte".to_string()));
    assert_eq!(llama(&["norm"], &[r"layers\.1\."]).len(), rest.len() + 1 + 2, "a tensor that --freeze matches is not trained");
    assert!(llama(&[], &[]).is_empty());
    assert_eq!(frozen("MixtralForCausalLM", &[r"experts\.\d+\."], &[]).len(), 2 * 2);
}

#[test]
fn impossible_choices_are_refused_by_name() {
    let refused = |architecture: &str, freeze: &[&str], train_only: &[&str]| freezing(architecture, freeze, train_only).unwrap_err();
    let llama = |freeze: &[&str]| refused("LlamaForCausalLM", freeze, &[]);
    let of_part = llama(&[r"layers\.0\.self_attn\.[qv]_proj"]);
    let q_v = "model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.v_proj.weight would be frozen";
    assert!(of_part.contains("layers.0.attn.qkv is one matrix") && of_part.contains(q_v), "{of_part}");
    assert!(of_part.contains("model.layers.0.self_attn.k_proj.weight trained"), "{of_part}");
    assert!(llama(&["gate_proj"]).contains("layers.1.mlp.gate_up is one matrix"));
    assert!(llama(&["layer.0"]).contains("--freeze \"layer.0\": matches no tensor of the model; names are such as lm_head.weight, "));
    assert!(llama(&["("]).contains("--freeze \"(\": not a regular expression: "), "{}", llama(&["("]));
    assert!(llama(&["."]).contains("nothing is left to train"));
    let none = refused("LlamaForCausalLM", &[], &["x"]);
    assert!(none.contains("--train-only \"x\": matches no tensor"), "{none}");
    let tied = ModelShape { tied: true, ..shape("Qwen3ForCausalLM") };
    let tied = tied.freezing(FreezeRules { freeze: &["lm_head".to_string()], train_only: &[], tokens: None }).unwrap_err().to_string();
    assert!(tied.contains("the output matrix of this model is its embedding, model.embed_tokens.weight"), "{tied}");
    let experts = refused("MixtralForCausalLM", &[r"experts\.0\."], &[]);
    assert!(experts.contains(".mlp.down is one matrix") && experts.contains("experts.2.w2.weight trained"), "{experts}");
    assert!(refused("GPT2LMHeadModel", &["wte"], &[]).contains("freeze both"));
    assert!(frozen("GPT2LMHeadModel", &["wpe"], &[]) == ["wpe"]);
}

fn training(architecture: &str, tokens: Range<usize>, freeze: &[&str], train_only: &[&str]) -> std::result::Result<ModelShape, String> {
    let [freeze, train_only] = [freeze, train_only].map(|patterns| patterns.iter().map(|pattern| pattern.to_string()).collect::<Vec<_>>());
    let rules = FreezeRules { freeze: &freeze, train_only: &train_only, tokens: Some(&tokens) };
    shape(architecture).freezing(rules).map_err(|e| e.to_string())
}

#[test]
fn tokens_restrict_both_tables_and_freeze_all_else_unless_expressions_choose() {
    let names = |architecture: &str, freeze: &[&str], train_only: &[&str]| {
        let table = TensorTable::new(&training(architecture, 50..60, freeze, train_only).unwrap());
        table.specs().iter().map(|spec| spec.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names("LlamaForCausalLM", &[], &[]), ["lm_head.rows", "wte.rows"]);
    let norms =
        ["lm_head.rows", "final_norm", "layers.1.mlp_norm", "layers.1.attn_norm", "layers.0.mlp_norm", "layers.0.attn_norm", "wte.rows"];
    assert_eq!(names("LlamaForCausalLM", &[], &["norm"]), norms);
    assert_eq!(names("LlamaForCausalLM", &[], &["norm", "embed_tokens"]), norms, "an expression does not train other rows");
    assert_eq!(names("LlamaForCausalLM", &["_proj"], &[]), norms);
    // The position embedding is trained without the rest of the token embedding.
    assert_eq!(names("GPT2LMHeadModel", &[], &["wpe"]), ["wte.rows", "wpe"]);
    let shape = training("LlamaForCausalLM", 50..60, &[], &[]).unwrap();
    let table = TensorTable::new(&shape);
    for (rows, whole) in [("lm_head.rows", "lm_head"), ("wte.rows", "wte")] {
        let find = |name: &str| table.all().find(|spec| spec.name == name).unwrap();
        let (rows, whole) = (find(rows), find(whole));
        assert_eq!((rows.shape[0], rows.shape[1], rows.first_token()), (10, whole.shape[1], Some(50)));
        let part = rows.parts().next().unwrap();
        assert_eq!((part.name.as_str(), rows.part_shape(&part)), (whole.parts().next().unwrap().name.as_str(), whole.shape.clone()));
    }
}

#[test]
fn impossible_tokens_are_refused_by_name() {
    let refused = |tokens: Range<usize>, freeze: &[&str]| training("LlamaForCausalLM", tokens, freeze, &[]).unwrap_err();
    assert!(refused(7..7, &[]).contains("--train-tokens 7..7: the range is empty"), "{}", refused(7..7, &[]));
    let beyond = refused(50..61, &[]);
    assert!(beyond.contains("--train-tokens 50..61: the model's token embedding has 60 rows"), "{beyond}");
    for (pattern, name) in [("embed", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight"), (".", "lm_head.weight")] {
        let table = refused(50..60, &["layers", pattern]);
        let words = format!("--freeze {pattern:?}: matches {name}, of which --train-tokens trains the rows 50..60");
        assert!(table.contains(&words), "{table}");
    }
}

#[test]
fn a_model_of_other_depth_freezes_the_same_layers_in_a_cycle() {
    let shape = freezing("LlamaForCausalLM", &[r"layers\.1\.mlp\.down", "embed"], &[]).unwrap();
    let of = |layers| shape.with_layers(layers).frozen.into_iter().collect::<Vec<_>>();
    assert_eq!((of(1), of(5)), (vec!["wte".to_string()], ["layers.1.mlp.down", "layers.3.mlp.down", "wte"].map(String::from).to_vec()));
}

proptest! {
    /// Any choice of whole tensors by their names divides the table in two, and keeps all offsets of a table in which nothing else is.
    #[test]
    fn a_choice_divides_the_table(choice in prop::collection::vec(any::<bool>(), 40), only in any::<bool>()) {
        let all = shape("Qwen3ForCausalLM");
        let table = TensorTable::new(&all);
        let chosen: Vec<_> = table.specs().iter().zip(choice.iter().cycle()).filter(|(_, chosen)| **chosen).map(|(spec, _)| spec).collect();
        let patterns: Vec<String> = chosen.iter().flat_map(|spec| spec.parts()).map(|part| format!("^{}$", part.name.replace('.', r"\."))).collect();
        let rules = if only { FreezeRules { freeze: &[], train_only: &patterns, tokens: None } } else { FreezeRules { freeze: &patterns, train_only: &[], tokens: None } };
        prop_assume!(!chosen.is_empty() && chosen.len() < table.specs().len());
        let divided = TensorTable::new(&all.clone().freezing(rules).unwrap());
        let names: Vec<&str> = chosen.iter().map(|spec| spec.name.as_str()).collect();
        prop_assert!(divided.all().all(|spec| spec.frozen == (names.contains(&spec.name.as_str()) != only)));
        prop_assert_eq!(divided.params(), table.params());
        for (range, elems) in [(divided.specs(), divided.flat_elems()), (divided.frozen(), divided.frozen_elems())] {
            let ends = range.iter().skip(1).map(|next| next.offset_elems).chain([elems]);
            prop_assert!(range.iter().zip(ends).all(|(spec, end)| spec.range().end <= end && end - spec.range().end < FLAT_ALIGN_ELEMS));
            prop_assert!(range.iter().all(|spec| table.all().any(|other| (other.index, &other.name) == (spec.index, &spec.name))));
        }
        prop_assert!(divided.modules().filter(|module| *module != Module::Embed).all(|module| divided.module_range(module).is_empty() || divided.runs_backward(module)));
    }
}
