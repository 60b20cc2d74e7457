//! The choice of frozen tensors, by regular expressions over the names of tensors in the model's files.
//!
//! A tensor of the table may consist of several tensors of the files, such as queries, keys and values. It is frozen or trained as a whole.

use super::shape::ModelShape;
use super::tensors::{HEAD, HfPart, Module, Role, TensorSpec, TensorTable};
use crate::error::{Error, Result};
use crate::units::counted;
use regex_automata::meta::Regex;
use std::collections::BTreeSet;
use std::ops::Range;

/// Names of tensors that an error lists at most.
const NAMES_LISTED: usize = 3;

/// The choice of a run. A tensor is frozen if an expression of `freeze` matches its name, or if there are expressions of `train_only` and none
/// of them does. With `tokens`, only their rows of the token embedding and of the output matrix are trained, and without expressions nothing
/// else is.
#[derive(Clone, Copy, Debug)]
pub struct FreezeRules<'a> {
    /// Expressions of `--freeze`.
    pub freeze: &'a [String],
    /// Expressions of `--train-only`.
    pub train_only: &'a [String],
    /// Tokens of `--train-tokens`.
    pub tokens: Option<&'a Range<usize>>,
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
    /// trained; if a token embedding would be frozen and a position embedding trained; for tokens that the model does not have, and for an
    /// expression that would freeze their rows.
    pub fn freezing(self, rules: FreezeRules<'_>) -> Result<Self> {
        let whole = Self { frozen: BTreeSet::new(), trained_tokens: None, ..self };
        let (tokens, has_expressions) = (rules.tokens, !(rules.freeze.is_empty() && rules.train_only.is_empty()));
        if !has_expressions && tokens.is_none() {
            return Ok(whole);
        }
        let (rules, table) = (Expressions::new(rules)?, TensorTable::new(&whole));
        rules.expect_matches(&whole, &table)?;
        tokens.map_or(Ok(()), |tokens| whole.check_tokens(tokens))?;
        let mut frozen = BTreeSet::new();
        for spec in table.specs() {
            let is_frozen = match tokens {
                Some(tokens) if spec.has_token_rows() => rules.expect_trained(spec, tokens).map(|()| true)?,
                Some(_) if !has_expressions => true,
                _ => rules.freezes(spec)?,
            };
            frozen.extend(is_frozen.then(|| spec.name.clone()));
        }
        if tokens.is_none() && frozen.len() == table.specs().len() {
            return Err(Error::usage("--freeze and --train-only: every tensor is frozen, so nothing is left to train"));
        }
        let shape = Self { frozen, trained_tokens: tokens.cloned(), ..whole };
        shape.check_embeddings()?;
        Ok(shape)
    }

    /// Refuses a range of tokens that the model does not have.
    fn check_tokens(&self, tokens: &Range<usize>) -> Result<()> {
        let Range { start, end } = *tokens;
        let refuse = |cause: String| Err(Error::usage(format!("--train-tokens {start}..{end}: {cause}")));
        if start >= end {
            return refuse("the range is empty; its end is the id after the last token".into());
        }
        if end > self.vocab {
            return refuse(format!("the model's token embedding has {} rows, for the ids below {0}", self.vocab));
        }
        Ok(())
    }

    /// Whether an export has tensors that training does not change: frozen ones, or those beside a text part.
    pub(crate) fn carries_tensors(&self) -> bool {
        !self.frozen.is_empty() || self.family.text_part().is_some()
    }

    /// Whether the whole output matrix is trained.
    pub(crate) fn trains_output(&self) -> bool {
        !self.frozen.contains(if self.tied { Role::Wte.name(false) } else { HEAD })
    }

    /// The trained rows of frozen tables, in words; `None` if the tables are trained or frozen as a whole.
    pub(crate) fn describe_trained_tokens(&self) -> Option<String> {
        let Range { start, end } = self.trained_tokens.as_ref()?;
        let tables = if self.tied {
            "the token embedding, which is also the output matrix,"
        } else {
            "the token embedding and of the output matrix"
        };
        Some(format!("rows {start}..{end} ({}) of {tables} are trained", counted(end - start, "token")))
    }

    /// Whether the whole token embedding or the whole output matrix is trained.
    pub(crate) fn trains_a_table(&self) -> bool {
        self.trains_output() || !self.frozen.contains(Role::Wte.name(false))
    }

    /// Whether the output matrix is the token embedding, and it or some of its rows are trained.
    pub(crate) fn trains_tied_output(&self) -> bool {
        self.tied && (self.trains_output() || self.trained_tokens.is_some())
    }

    /// One kernel computes the gradients of both embeddings.
    fn check_embeddings(&self) -> Result<()> {
        if self.trained_tokens.is_some() {
            return Ok(());
        }
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
    fn new(FreezeRules { freeze, train_only, .. }: FreezeRules<'a>) -> Result<Self> {
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

    /// Refuses an expression of `--freeze` that matches the table `spec`, of which the rows of `tokens` are to be trained.
    fn expect_trained(&self, spec: &TensorSpec, tokens: &Range<usize>) -> Result<()> {
        let part = |expression: &Expression| spec.parts().find(|part| expression.regex.is_match(&part.name));
        let Some((expression, part)) = self.freeze.iter().find_map(|expression| Some((expression, part(expression)?))) else {
            return Ok(());
        };
        let (Expression { flag, pattern, .. }, HfPart { name, .. }, Range { start, end }) = (expression, part, tokens);
        Err(Error::usage(format!(
            "{flag} {pattern:?}: matches {name}, of which --train-tokens trains the rows {start}..{end}; --train-tokens alone freezes all \
             other rows"
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
