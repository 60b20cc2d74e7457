//! Order and membership as Python has them: it orders no values of different types and finds nothing in a text but text, where the template
//! engine has a result for any two values.

use super::bounds::JSON_DEPTH_MAX;
use super::methods::invalid;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, State, tests};

/// Requirement of a filter on the items of its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Demand {
    Nothing,
    /// Items have an order by their attributes, of which the first ones that differ count.
    OrderOfLists,
    /// Items have an order by their attribute.
    Order,
    /// Items may be keys of a map.
    Keys,
    /// Items are defined.
    Defined,
    /// The keys of a map, or its values, have an order.
    OrderOfMap,
}

/// The attributes by which a filter compares items, and how.
struct Comparison {
    attribute: Option<String>,
    default: Value,
    folds_case: bool,
    by_value: bool,
}

impl Comparison {
    /// The comparison of a filter with `args` after its list.
    fn new(args: &[Value]) -> Result<Self, Error> {
        let options = args.last().filter(|last| last.is_kwargs()).map(|last| Kwargs::try_from(last.clone())).transpose()?;
        let named = |name: &str| options.as_ref().and_then(|options| options.peek::<Value>(name).ok());
        let attribute = named("attribute").or_else(|| args.first().cloned()).and_then(|name| name.as_str().map(String::from));
        Ok(Self {
            attribute,
            default: named("default").unwrap_or_default(),
            folds_case: !named("case_sensitive").is_some_and(|is_sensitive| is_sensitive.is_true()),
            by_value: named("by").is_some_and(|by| by.as_str() == Some("value")),
        })
    }

    fn folded(&self, value: Value) -> Value {
        match value.as_str() {
            Some(text) if self.folds_case => text.to_lowercase().into(),
            _ => value,
        }
    }

    fn attribute(&self, item: &Value, name: &str) -> Value {
        let value = at_path(item, name);
        self.folded(if value.is_undefined() { self.default.clone() } else { value })
    }

    fn key(&self, item: Value) -> Value {
        self.attribute.as_ref().map_or_else(|| self.folded(item.clone()), |name| self.attribute(&item, name))
    }

    /// The attributes of `item` as a list.
    fn keys(&self, item: &Value) -> Value {
        let all = |all: &String| all.split(',').map(|name| self.attribute(item, name.trim())).collect();
        self.attribute.as_ref().map_or_else(|| vec![self.folded(item.clone())].into(), all)
    }
}

impl Demand {
    /// Checks the arguments of a filter, of which the first is its list or map.
    ///
    /// # Errors
    /// Two items without an order, or an item that is no key or is undefined.
    pub(super) fn check(self, state: &mut State, args: &[Value]) -> Result<(), Error> {
        let Some((value, args)) = args.split_first().filter(|(value, _)| self != Self::Nothing && !value.is_undefined()) else {
            return Ok(());
        };
        let comparison = Comparison::new(args)?;
        let items: Vec<Value> = value.try_iter()?.collect();
        state.consume_fuel(items.len() as u64)?;
        let keys = |items: Vec<Value>| items.into_iter().map(|item| comparison.key(item));
        match self {
            Self::Nothing => Ok(()),
            Self::OrderOfLists => {
                let mut keys: Vec<Value> = items.iter().map(|item| comparison.keys(item)).collect();
                keys.sort();
                ordered(&keys)
            }
            Self::Order => ordered(&keys(items).collect::<Vec<_>>()),
            Self::OrderOfMap if comparison.by_value => {
                ordered(&items.iter().map(|key| value.get_item(key)).collect::<Result<Vec<_>, _>>()?)
            }
            Self::OrderOfMap => ordered(&items),
            Self::Keys => keys(items).try_for_each(|key| hashable(&key)),
            Self::Defined if keys(items).any(|key| key.is_undefined()) => Err(invalid("an item is undefined")),
            Self::Defined => Ok(()),
        }
    }
}

/// Whether each of these has an order with the next one.
fn ordered(keys: &[Value]) -> Result<(), Error> {
    keys.windows(2).try_for_each(|pair| comparable(&pair[0], &pair[1]))
}

/// The attribute of an item that a path with dots names; undefined where there is none.
fn at_path(item: &Value, path: &str) -> Value {
    let step = |value: Value, name: &str| match name.parse::<usize>() {
        Ok(at) => value.get_item(&at.into()),
        Err(_) => value.get_attr(name),
    };
    path.split('.').try_fold(item.clone(), step).unwrap_or_default()
}

/// Whether Python orders these values. Of lists it orders the first items that differ.
///
/// # Errors
/// The types of two values without an order.
pub(super) fn comparable(a: &Value, b: &Value) -> Result<(), Error> {
    comparable_within(a, b, JSON_DEPTH_MAX)
}

fn comparable_within(a: &Value, b: &Value, depth: usize) -> Result<(), Error> {
    let order = |value: &Value| match value.kind() {
        ValueKind::Number | ValueKind::Bool => Some(0),
        ValueKind::String => Some(1),
        ValueKind::Seq if value.is_tuple() => Some(2),
        ValueKind::Seq => Some(3),
        _ => None,
    };
    match (order(a), order(b)) {
        (Some(a), Some(b)) if a == b && a < 2 => Ok(()),
        (Some(of_a), Some(of_b)) if of_a == of_b && depth > 0 => {
            let differing = a.try_iter()?.zip(b.try_iter()?).find(|(a, b)| a != b);
            if let Some((a, b)) = differing { comparable_within(&a, &b, depth - 1) } else { Ok(()) }
        }
        _ => Err(invalid(format!("values of type {} and {} have no order", a.kind(), b.kind()))),
    }
}

/// Whether Python takes `value` for a key of a map.
fn hashable(value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Map => Err(invalid("a map is no key of another one")),
        ValueKind::Seq if value.is_tuple() => value.try_iter()?.try_for_each(|item| hashable(&item)),
        ValueKind::Seq => Err(invalid("a list is no key of a map")),
        _ => Ok(()),
    }
}

/// Whether `container` has `value`.
///
/// # Errors
/// For a text that is asked for something else than text, a map that is asked for a list or a map, and a value that contains nothing.
pub(super) fn contains(state: &mut State, value: &Value, container: &Value) -> Result<bool, Error> {
    match container.kind() {
        ValueKind::Undefined => return Ok(false),
        ValueKind::String if value.kind() != ValueKind::String => {
            return Err(invalid(format!("in: a text has no value of type {} in it", value.kind())));
        }
        ValueKind::Map => hashable(value)?,
        ValueKind::String | ValueKind::Seq | ValueKind::Iterable => {}
        kind => return Err(invalid(format!("in: a value of type {kind} contains nothing"))),
    }
    tests::is_in(state, value, container)
}
