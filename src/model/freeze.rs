//! The choice of frozen tensors, by regular expressions over the names of tensors in the model's files.
//!
//! A tensor of the table may consist of several tensors of the files, such as queries, keys and values. It is frozen or trained as a whole.

use super::shape::ModelShape;
use super::tensors::{HEAD, Module, Role, TensorSpec, TensorTable};
use crate::error::{Error, Result};
use regex_automata::meta::Regex;
use std::collections::BTreeSet;

/// Names of tensors that an error lists at most.
const NAMES_LISTED: usize = 3;

/// The expressions of a run. A tensor is frozen if an expression of `freeze` matches its name, or if there are expressions of `train_only`
/// and none of them does.
#[derive(Clone, Copy, Debug)]
pub struct FreezeRules<'a> {
    /// Expressions of `--freeze`.
    pub freeze: &'a [String],
    /// Expressions of `--train-only`.
    pub train_only: &'a [String],
}

/// An expression with its flag.
struct Expression<'a> {
    flag: &'static str,
    pattern: &'a str,
    regex: Regex,
}

/// All expressions, compiled.
struct Expressions<'a> {
    freeze: Vec<Expression<'a>>,
    train_only: Vec<Expression<'a>>,
}

impl ModelShape {
    /// This model with the tensors frozen that `rules` choose.
    ///
    /// # Errors
    /// `Usage` for an expression that is invalid or matches no tensor; for a tensor that would be frozen in part; if nothing would be
    /// trained; if a token embedding would be frozen and a position embedding trained.
    pub fn freezing(self, rules: FreezeRules<'_>) -> Result<Self> {
        if rules.freeze.is_empty() && rules.train_only.is_empty() {
            return Ok(Self { frozen: BTreeSet::new(), ..self });
        }
        let rules = Expressions::new(rules)?;
        let table = TensorTable::new(&Self { frozen: BTreeSet::new(), ..self.clone() });
        rules.expect_matches(&self, &table)?;
        let mut frozen = BTreeSet::new();
        for spec in table.specs() {
            if rules.freezes(spec)? {
                frozen.insert(spec.name.clone());
            }
        }
        if frozen.len() == table.specs().len() {
            return Err(Error::usage("--freeze and --train-only: every tensor is frozen, so nothing is left to train"));
        }
        let shape = Self { frozen, ..self };
        shape.check_embeddings()?;
        Ok(shape)
    }

    /// Whether an export has tensors that training does not change: frozen ones, or those beside a text part.
    pub(crate) fn carries_tensors(&self) -> bool {
        !self.frozen.is_empty() || self.family.text_part().is_some()
    }

    /// Whether the output matrix is trained.
    pub(crate) fn trains_output(&self) -> bool {
        !self.frozen.contains(if self.tied { Role::Wte.name(false) } else { HEAD })
    }

    /// Whether the output matrix is the token embedding, and trained.
    pub(crate) fn trains_tied_output(&self) -> bool {
        self.tied && self.trains_output()
    }

    /// One kernel computes the gradients of both embeddings.
    fn check_embeddings(&self) -> Result<()> {
        let table = TensorTable::new(self);
        let is_frozen = |role| table.find(Module::Embed, role).map(|spec| spec.frozen);
        match (is_frozen(Role::Wte), is_frozen(Role::Wpe)) {
            (Some(true), Some(false)) => {
                Err(Error::usage("--freeze and --train-only: a frozen token embedding needs frozen position embeddings; freeze both"))
            }
            _ => Ok(()),
        }
    }
}

impl<'a> Expressions<'a> {
    fn new(FreezeRules { freeze, train_only }: FreezeRules<'a>) -> Result<Self> {
        let compiled = |flag, patterns: &'a [String]| patterns.iter().map(|pattern| Expression::new(flag, pattern)).collect::<Result<_>>();
        Ok(Self { freeze: compiled("--freeze", freeze)?, train_only: compiled("--train-only", train_only)? })
    }

    /// Whether the tensor of the files with this `name` is frozen.
    fn freezes_name(&self, name: &str) -> bool {
        let matches = |rules: &[Expression]| rules.iter().any(|expression| expression.regex.is_match(name));
        matches(&self.freeze) || !self.train_only.is_empty() && !matches(&self.train_only)
    }

    /// Whether the tensor `spec` is frozen.
    fn freezes(&self, spec: &TensorSpec) -> Result<bool> {
        let (frozen, trained): (Vec<_>, Vec<_>) = spec.parts().map(|part| part.name).partition(|name| self.freezes_name(name));
        if frozen.is_empty() || trained.is_empty() {
            return Ok(trained.is_empty());
        }
        let (frozen, trained) = (listed(&frozen), listed(&trained));
        Err(Error::usage(format!(
            "--freeze and --train-only: {} is one matrix here, which is frozen or trained as a whole, but {frozen} would be frozen and \
             {trained} trained; let the expressions match all or none of them",
            spec.name
        )))
    }

    /// Refuses an expression that matches no tensor.
    fn expect_matches(&self, shape: &ModelShape, table: &TensorTable) -> Result<()> {
        let names: Vec<String> = table.specs().iter().flat_map(|spec| spec.parts().map(|part| part.name)).collect();
        let matches_none = |expression: &&Expression| !names.iter().any(|name| expression.regex.is_match(name));
        let Some(expression) = self.freeze.iter().chain(&self.train_only).find(matches_none) else { return Ok(()) };
        let remedy = match names.last() {
            Some(embedding) if shape.tied && expression.regex.is_match(shape.family.spec().names.head) => {
                format!("the output matrix of this model is its embedding, {embedding}")
            }
            _ => format!("names are such as {}", listed(&names)),
        };
        Err(Error::usage(format!("{} {:?}: matches no tensor of the model; {remedy}", expression.flag, expression.pattern)))
    }
}

impl<'a> Expression<'a> {
    fn new(flag: &'static str, pattern: &'a str) -> Result<Self> {
        let regex = Regex::new(pattern).map_err(|e| {
            let cause = e.syntax_error().map_or_else(|| e.to_string(), ToString::to_string);
            Error::usage(format!("{flag} {pattern:?}: not a regular expression: {cause}"))
        })?;
        Ok(Self { flag, pattern, regex })
    }
}

/// The first of `names`.
fn listed(names: &[String]) -> String {
    let more = if names.len() > NAMES_LISTED { ", ..." } else { "" };
    format!("{}{more}", names[..names.len().min(NAMES_LISTED)].join(", "))
}

#[cfg(test)]
#[path = "freeze_tests.rs"]
mod tests;
