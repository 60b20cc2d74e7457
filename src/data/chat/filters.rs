//! Filters, tests and functions of Jinja that the template engine lacks, or that do otherwise there than in Python.

use super::bounds::{self, TEXT_BYTES_MAX, check_indent};
use super::integers::BigInteger;
use super::methods::{WIDE_TEXT, invalid, lines, pad};
use super::order::{Demand, comparable, contains};
use super::python::{self, JsonLayout};
use minijinja::value::{Kwargs, Object, Rest, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters, functions, tests};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Filters of lists, the names of their options by place, and their requirement on the items.
const OF_LISTS: [(&str, &[&str], Demand); 10] = [
    ("join", &[], Demand::Nothing),
    ("list", &[], Demand::Nothing),
    ("sort", &["reverse", "case_sensitive", "attribute"], Demand::OrderOfLists),
    ("unique", &["case_sensitive", "attribute"], Demand::Keys),
    ("sum", &[], Demand::Defined),
    ("max", &["case_sensitive", "attribute"], Demand::Order),
    ("min", &["case_sensitive", "attribute"], Demand::Order),
    ("batch", &[], Demand::Nothing),
    ("groupby", &[], Demand::Order),
    ("dictsort", &["case_sensitive", "by", "reverse"], Demand::OrderOfMap),
];

/// Filters of the engine that Jinja does not have.
const NOT_OF_JINJA: [&str; 5] = ["bool", "chain", "lines", "split", "zip"];
/// Filters of Jinja that no known chat template uses.
const NOT_HERE: [&str; 7] = ["filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"];

type Compare = fn(&Value, &Value) -> bool;

/// Tests that compare, under all their names.
const COMPARISONS: [(&[&str], Compare); 4] = [
    (&["lt", "lessthan", "<"], |a, b| a < b),
    (&["le", "<="], |a, b| a <= b),
    (&["gt", "greaterthan", ">"], |a, b| a > b),
    (&["ge", ">="], |a, b| a >= b),
];

/// Adds the filters, tests and functions of this module to `environment`.
pub(super) fn add(environment: &mut Environment<'static>) {
    for name in &NOT_OF_JINJA {
        environment.remove_filter(name);
    }
    environment.add_filter("tojson", to_json);
    environment.add_filter("format", format_percents);
    environment.add_filter("int", to_int);
    environment.add_filter("float", to_float);
    // Python's objects have their attributes apart from their items.
    environment.add_filter("attr", |value: &Value, name: &str| match value.kind() {
        ValueKind::Map => Ok(Value::UNDEFINED),
        _ => value.get_attr(name),
    });
    environment.add_filter("urlencode", url_encode);
    for name in NOT_HERE {
        environment.add_filter(name, move |_: &Value, _: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            Err(invalid(format!("{name}: this filter of jinja2 is not available here")))
        });
    }
    environment.add_filter("wordcount", |value: &Value| words(&value.to_string()));
    for name in ["default", "d"] {
        environment.add_filter(name, default);
    }
    let builtin = [
        Value::from_function(filters::join),
        Value::from_function(filters::list),
        Value::from_function(filters::sort),
        Value::from_function(filters::unique),
        Value::from_function(filters::sum),
        Value::from_function(filters::max),
        Value::from_function(filters::min),
        Value::from_function(filters::batch),
        Value::from_function(filters::groupby),
        Value::from_function(filters::dictsort),
    ];
    for ((name, options, demand), builtin) in OF_LISTS.into_iter().zip(builtin) {
        environment.add_filter(name, move |state: &mut State, value: Value, args: Rest<ValueOrKwargs>| {
            state.consume_fuel(value.len().unwrap_or(0) as u64)?;
            let args = args.into_values();
            if demand != Demand::Nothing {
                all_defined(name, &args)?;
            }
            let args = by_name(each(value)?, args, options);
            demand.check(state, &args).map_err(|error| within(name, error))?;
            builtin.call(state, &args)
        });
    }
    add_checked(environment);
    add_operators(environment);
    add_tests(environment);
    environment.add_function("cycler", |items: Rest<Value>| match items.is_empty() {
        true => Err(invalid("cycler: at least one item has to be provided")),
        false => Ok(Value::from_object(Cycler { items: items.to_vec(), next: AtomicUsize::new(0) })),
    });
    environment.add_function("joiner", |separator: Option<String>, options: Kwargs| -> Result<Value, Error> {
        let separator = separator.map_or_else(|| options.get::<Option<String>>("sep"), |separator| Ok(Some(separator)))?;
        options.assert_all_used()?;
        Ok(Value::from_object(JinjaJoiner { separator: separator.unwrap_or_else(|| ", ".into()), is_used: AtomicBool::new(false) }))
    });
}

/// Adds filters and functions with an error for an argument that is undefined. The engine takes it for one that is not there.
fn add_checked(environment: &mut Environment<'static>) {
    let center = |value: &Value, width: Option<usize>| pad(&value.to_string(), width.unwrap_or(80), ' ', [1, 1]);
    for (name, filter) in [
        ("center", Value::from_function(center)),
        ("indent", Value::from_function(indent)),
        ("round", Value::from_function(filters::round)),
        ("trim", Value::from_function(filters::trim)),
        ("truncate", Value::from_function(truncate)),
    ] {
        environment.add_filter(name, move |state: &mut State, value: Value, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            all_defined(name, &args)?;
            filter.call(state, &[&[value], &args[..]].concat())
        });
    }
    for (name, function) in [("dict", Value::from_function(functions::dict)), ("range", Value::from_function(functions::range))] {
        environment.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            all_defined(name, &args)?;
            function.call(state, &args)
        });
    }
}

/// # Errors
/// For an argument of `name` that is undefined, by place or by name.
fn all_defined(name: &str, args: &[Value]) -> Result<(), Error> {
    let is_undefined = |arg: &Value| match arg.is_kwargs() {
        true => arg.try_iter().is_ok_and(|mut keys| keys.any(|key| arg.get_item(&key).is_ok_and(|value| value.is_undefined()))),
        false => arg.is_undefined(),
    };
    if args.iter().any(is_undefined) { Err(invalid(format!("{name}: an argument is undefined"))) } else { Ok(()) }
}

/// Adds the functions and filters that take the place of operators: see [`super::rewrite`].
fn add_operators(environment: &mut Environment<'static>) {
    environment.add_filter("_each", each);
    environment.add_filter("_each_unpacked", each_unpacked);
    environment.add_function("_sliced", |value: Value| match value.kind() {
        ValueKind::None | ValueKind::Undefined => Err(invalid(format!("a value of type {} has no parts", value.kind()))),
        _ => Ok(value),
    });
    environment.add_function("_modulo", modulo);
    environment.add_function("_less", |a: &Value, b: &Value| comparable(a, b).map(|()| a < b));
    environment.add_function("_less_equal", |a: &Value, b: &Value| comparable(a, b).map(|()| a <= b));
    environment.add_function("_greater", |a: &Value, b: &Value| comparable(a, b).map(|()| a > b));
    environment.add_function("_greater_equal", |a: &Value, b: &Value| comparable(a, b).map(|()| a >= b));
    environment.add_function("_in", contains);
    environment.add_function("_not_in", |state: &mut State, value: &Value, container: &Value| {
        contains(state, value, container).map(|contained| !contained)
    });
}

fn add_tests(environment: &mut Environment<'static>) {
    let is_big = |value: &Value| value.downcast_object_ref::<BigInteger>().is_some();
    environment.add_test("in", contains);
    environment.add_test("iterable", |value: &Value| value.kind() != ValueKind::None && value.try_iter().is_ok());
    // The engine makes iterators of parts and sums of lists.
    let is_sequence =
        |kind| matches!(kind, ValueKind::Undefined | ValueKind::String | ValueKind::Map | ValueKind::Seq | ValueKind::Iterable);
    environment.add_test("sequence", move |value: &Value| is_sequence(value.kind()));
    for (name, is_odd) in [("odd", 1), ("even", 0)] {
        environment.add_test(name, move |state: &mut State, value: Value| {
            modulo(state, &value, &2.into()).map(|rest| rest == Value::from(is_odd))
        });
    }
    environment.add_test("divisibleby", |state: &mut State, value: &Value, by: &Value| {
        modulo(state, value, by).map(|rest| rest == Value::from(0))
    });
    for names in COMPARISONS {
        for name in names.0 {
            environment.add_test(*name, move |a: &Value, b: &Value| comparable(a, b).map(|()| (names.1)(a, b)));
        }
    }
    environment.add_test("number", move |value: &Value| is_big(value) || tests::is_number(value));
    environment.add_test("integer", move |value: &Value| is_big(value) || tests::is_integer(value));
}

fn to_json(value: &Value, by_place: Rest<Value>, by_name: Kwargs) -> Result<Value, Error> {
    let json = JsonLayout::new(&by_place, &by_name).and_then(|layout| layout.dumps(value));
    json.map(Value::from_safe_string).map_err(|cause| invalid(format!("tojson: {cause}")))
}

fn format_percents(state: &mut State, format: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let (format, args) = with_quoted(format, args.into_values())?;
    let text = format.as_str().unwrap_or_default();
    bounds::check_percents(text).map_err(invalid)?;
    if bounds::has_width(text) && args.iter().any(|arg| arg.as_str().is_some_and(|text| !text.is_ascii())) {
        return Err(invalid(WIDE_TEXT));
    }
    Value::from_function(filters::format).call(state, &[std::slice::from_ref(&format), &args[..]].concat())
}

/// A format with `%s` in place of each `%r`, and its values with those of `%r` as `repr` writes them.
fn with_quoted(format: &Value, mut args: Vec<Value>) -> Result<(Value, Vec<Value>), Error> {
    let Some(text) = format.as_str().filter(|text| text.contains('r')) else { return Ok((format.clone(), args)) };
    let (mut out, mut rest, mut taken) = (String::new(), text, 0);
    while let Some(at) = rest.find('%') {
        let (before, spec) = rest.split_at(at);
        let end = spec[1..].find(|c: char| !matches!(c, '#' | '0'..='9' | '-' | ' ' | '+' | '.')).map_or(spec.len(), |end| end + 1);
        let letter = spec[end..].chars().next();
        let is_quoted = letter == Some('r');
        out.extend([before, &spec[..end]]);
        out.extend(letter.map(|letter| if is_quoted { 's' } else { letter }));
        if let Some(arg) = args.get_mut(taken).filter(|_| is_quoted) {
            *arg = repr(arg)?.into();
        }
        taken += usize::from(letter != Some('%'));
        rest = &spec[end + letter.map_or(0, char::len_utf8)..];
    }
    Ok(((out + rest).into(), args))
}

/// `value` as Python's `repr` writes it.
fn repr(value: &Value) -> Result<String, Error> {
    let is_known = |c: char| c.is_ascii() && c != '\u{7f}' || c.is_alphanumeric();
    match value.kind() {
        ValueKind::None | ValueKind::Bool => Ok(value.to_string()),
        ValueKind::Number => Ok(python::number(value)),
        ValueKind::String if value.as_str().is_some_and(|text| text.chars().all(is_known)) => {
            let list = Value::from(vec![value.clone()]).to_string();
            Ok(list[1..list.len() - 1].into())
        }
        kind => Err(invalid(format!("%r: a value of type {kind}, or text of other characters than letters, is not supported"))),
    }
}

/// An error of the filter `name`.
fn within(name: &str, error: Error) -> Error {
    match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(cause)) => invalid(format!("{name}: {cause}")),
        _ => error,
    }
}

/// `value`, unless it is None, which the engine takes for an empty list.
fn each(value: Value) -> Result<Value, Error> {
    if value.is_none() { Err(invalid("None is no list")) } else { Ok(value) }
}

/// As [`each`], with texts in it as lists of their characters.
fn each_unpacked(state: &mut State, value: Value) -> Result<Value, Error> {
    let value = each(value)?;
    if value.is_undefined() {
        return Ok(value);
    }
    let mut has_texts = false;
    for item in value.try_iter()? {
        let text = item.as_str();
        has_texts |= text.is_some();
        state.consume_fuel(1 + text.map_or(0, str::len) as u64)?;
    }
    let characters = |text: &str| text.chars().map(|c| Value::from(c.to_string())).collect();
    let unpacked = |item: Value| item.as_str().map_or_else(|| item.clone(), characters);
    Ok(if has_texts { value.try_iter()?.map(unpacked).collect() } else { value })
}

/// The arguments of a filter with options by name where its caller gave them by place.
fn by_name(value: Value, mut args: Vec<Value>, options: &[&'static str]) -> Vec<Value> {
    if options.is_empty() || args.is_empty() {
        return std::iter::once(value).chain(args).collect();
    }
    let named = args.pop_if(|last| last.is_kwargs());
    let mut all: Vec<(&str, Value)> = options.iter().copied().zip(args.drain(..).take(options.len())).collect();
    let keys = named.iter().filter_map(|named| named.try_iter().ok()).flatten();
    let keys: Vec<Value> = keys.collect();
    let entries = keys.iter().filter_map(|key| Some((key.as_str()?, named.as_ref()?.get_item(key).ok()?)));
    all.extend(entries);
    vec![value, Kwargs::from_iter(all).into()]
}

fn default(value: Value, other: Option<Value>, is_lax: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let option = |given: Option<Value>, name| given.map_or_else(|| options.get::<Option<Value>>(name), |given| Ok(Some(given)));
    let (other, is_lax) = (option(other, "default_value")?, option(is_lax, "boolean")?);
    options.assert_all_used()?;
    let is_replaced = value.is_undefined() || is_lax.is_some_and(|is_lax| is_lax.is_true()) && !value.is_true();
    Ok(if is_replaced { other.unwrap_or_else(|| "".into()) } else { value })
}

/// The format `a` with `b`, or the remainder of numbers.
fn modulo(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    if a.kind() == ValueKind::String {
        let args: Vec<Value> = if b.is_tuple() { b.try_iter()?.collect() } else { vec![b.clone()] };
        // A list or a map may be left over.
        let is_rest = b.is_tuple() || !matches!(b.kind(), ValueKind::Seq | ValueKind::Map);
        if is_rest && args.len() > bounds::conversions(a.as_str().unwrap_or_default()) {
            return Err(invalid("%: more values than the format has places"));
        }
        let all: Vec<Value> = std::iter::once(a.clone()).chain(args).collect();
        return Value::from_function(format_percents).call(state, &all);
    }
    let unsupported = || invalid(format!("% of {} and {} is not defined", a.kind(), b.kind()));
    let is_whole = |value: &Value| value.is_integer() || value.kind() == ValueKind::Bool;
    let zero = || invalid("division by zero");
    if is_whole(a) && is_whole(b) {
        let (a, b) = (i128::try_from(a.clone())?, i128::try_from(b.clone())?);
        let rest = a.checked_rem(b).ok_or_else(zero)?;
        return Ok(Value::from(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }));
    }
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !(is_number(a) && is_number(b)) {
        return Err(unsupported());
    }
    let (a, b) = (f64::try_from(a.clone())?, f64::try_from(b.clone())?);
    let rest = if b == 0.0 { return Err(zero()) } else { a % b };
    Ok(Value::from(if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }))
}

/// The option of a filter by place, or by name.
fn option<T>(by_place: Option<T>, by_name: &Kwargs, name: &'static str) -> Result<Option<T>, Error>
where
    Option<T>: for<'a> minijinja::value::ArgType<'a, Output = Option<T>>,
{
    by_place.map_or_else(|| by_name.get::<Option<T>>(name), |value| Ok(Some(value)))
}

fn to_int(value: &Value, default: Option<Value>, base: Option<u32>, options: Kwargs) -> Result<Value, Error> {
    let (default, base) = (option(default, &options, "default")?, option(base, &options, "base")?.unwrap_or(10));
    options.assert_all_used()?;
    let default = default.unwrap_or_else(|| 0.into());
    match value.kind() {
        ValueKind::Undefined => Err(invalid("int: the value is undefined")),
        ValueKind::Number if value.is_integer() => Ok(value.clone()),
        ValueKind::Bool => Ok(i64::from(value.is_true()).into()),
        ValueKind::Number | ValueKind::String => {
            let text = value.to_string();
            let whole = (2..=36).contains(&base).then(|| whole(&text, base)).flatten();
            let float = || number(&text).filter(|float| float.is_finite() && float.abs() < 1e38).map(|float| float as i128);
            Ok(whole.or_else(float).map_or(default, Value::from))
        }
        _ => Ok(default),
    }
}

/// The integer that Python reads in `text`.
fn whole(text: &str, base: u32) -> Option<i128> {
    let text = text.trim().to_ascii_lowercase();
    let (sign, digits) = text.strip_prefix('-').map_or((1, text.strip_prefix('+').unwrap_or(&text)), |digits| (-1, digits));
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let digits = digits.strip_prefix(prefix).unwrap_or(digits);
    let is_plain = digits.chars().all(|c| c.is_ascii_alphanumeric());
    i128::from_str_radix(digits, base).ok().filter(|_| is_plain).map(|digits| sign * digits)
}

fn number(text: &str) -> Option<f64> {
    text.trim().parse().ok()
}

fn to_float(value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = option(default, &options, "default")?.unwrap_or_else(|| 0.0.into());
    options.assert_all_used()?;
    match value.kind() {
        ValueKind::Undefined => Err(invalid("float: the value is undefined")),
        ValueKind::Bool => Ok(f64::from(u8::from(value.is_true())).into()),
        ValueKind::Number => f64::try_from(value.clone()).map(Value::from),
        ValueKind::String => Ok(value.as_str().and_then(number).map_or(default, Value::from)),
        _ => Ok(default),
    }
}

fn indent(value: &Value, width: Option<Value>, first: Option<bool>, blank: Option<bool>, options: Kwargs) -> Result<Value, Error> {
    let width = option(width, &options, "width")?.unwrap_or_else(|| 4.into());
    let (first, blank) = (option(first, &options, "first")?.unwrap_or(false), option(blank, &options, "blank")?.unwrap_or(false));
    options.assert_all_used()?;
    let text = match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default(),
        kind => return Err(invalid(format!("indent: a value of type {kind} is no text"))),
    };
    let by = match width.as_str() {
        Some(by) => check_indent(by.len()).map(|()| by.to_string()),
        None => i64::try_from(width.clone()).map_or(Err(format!("an indent of {width}")), |spaces| {
            let spaces = usize::try_from(spaces).unwrap_or(0);
            check_indent(spaces).map(|()| " ".repeat(spaces))
        }),
    };
    let by = by.map_err(|cause| invalid(format!("indent: {cause}")))?;
    let text = format!("{text}\n");
    let lines = lines(&text, false);
    if text.len().saturating_add(lines.len().saturating_mul(by.len() + 1)) > TEXT_BYTES_MAX {
        return Err(invalid(format!("indent: more than {TEXT_BYTES_MAX} bytes of text")));
    }
    let mut out = if first { by.clone() } else { String::new() };
    for (at, line) in lines.iter().enumerate() {
        if at > 0 {
            out.push('\n');
            out.push_str(if line.is_empty() && !blank { "" } else { &by });
        }
        out.push_str(line);
    }
    Ok(out.into())
}

fn truncate(value: &Value, by_place: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let (length, killwords, end, leeway): (Option<usize>, Option<bool>, Option<String>, Option<usize>) = from_args(&by_place)?;
    let length = option(length, &options, "length")?.unwrap_or(255);
    let killwords = option(killwords, &options, "killwords")?.unwrap_or(false);
    let end = option(end, &options, "end")?.unwrap_or_else(|| "...".into());
    let leeway = option(leeway, &options, "leeway")?.unwrap_or(5);
    options.assert_all_used()?;
    let kept =
        length.checked_sub(end.chars().count()).ok_or_else(|| invalid(format!("truncate: expected a length of {end:?} at least")))?;
    if value.is_undefined() || value.len().is_some_and(|len| len <= length.saturating_add(leeway)) {
        return Ok(value.clone());
    }
    let text = value.as_str().ok_or_else(|| invalid(format!("truncate: a value of type {} is no text", value.kind())))?;
    let cut = text.char_indices().nth(kept).map_or(text, |(at, _)| &text[..at]);
    let cut = if killwords { cut } else { cut.rsplit_once(' ').map_or(cut, |(words, _)| words) };
    Ok(format!("{cut}{end}").into())
}

/// A text, or the keys and values of a map or of a list of pairs, as a URL has them.
fn url_encode(value: &Value) -> Result<String, Error> {
    let text = |value: &Value| match value.kind() {
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map | ValueKind::Undefined => {
            Err(invalid(format!("urlencode: a value of type {} is no text", value.kind())))
        }
        _ => Ok(value.to_string()),
    };
    let pair = |pair: Vec<Value>| match &pair[..] {
        [key, value] => Ok(format!("{}={}", url_text(&text(key)?, true), url_text(&text(value)?, true))),
        _ => Err(invalid("urlencode: an item is no pair")),
    };
    let pairs: Vec<String> = match value.kind() {
        ValueKind::Map => value.try_iter()?.map(|key| pair(vec![key.clone(), value.get_item(&key)?])).collect::<Result<_, _>>()?,
        ValueKind::Seq => value.try_iter()?.map(|item| pair(item.try_iter()?.collect())).collect::<Result<_, _>>()?,
        _ => return Ok(url_text(&text(value)?, false)),
    };
    Ok(pairs.join("&"))
}

/// Bytes that a URL does not have as `%` and two digits; in a query also slashes, and spaces as `+`.
fn url_text(text: &str, in_query: bool) -> String {
    let encoded = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => char::from(byte).to_string(),
        b'/' if !in_query => "/".into(),
        b' ' if in_query => "+".into(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encoded).collect()
}

/// Runs of letters, digits and underscores.
fn words(text: &str) -> usize {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty()).count()
}

/// A list of items that a template takes in turn.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    next: AtomicUsize,
}

impl Cycler {
    fn current(&self) -> Value {
        self.items[self.next.load(Ordering::Relaxed) % self.items.len()].clone()
    }
}

impl Object for Cycler {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.current())
    }

    fn call_method(self: &Arc<Self>, _: &mut State<'_, '_>, method: &str, args: &[Value]) -> Result<Value, Error> {
        let () = from_args(args)?;
        match method {
            "next" => {
                let current = self.current();
                self.next.fetch_add(1, Ordering::Relaxed);
                Ok(current)
            }
            "reset" => {
                self.next.store(0, Ordering::Relaxed);
                Ok(().into())
            }
            _ => Err(ErrorKind::UnknownMethod.into()),
        }
    }
}

/// A function that returns an empty text at its first call, and its separator at each later call.
#[derive(Debug)]
struct JinjaJoiner {
    separator: String,
    is_used: AtomicBool,
}

impl Object for JinjaJoiner {
    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let () = from_args(args)?;
        Ok(if self.is_used.swap(true, Ordering::Relaxed) { self.separator.clone().into() } else { "".into() })
    }
}
