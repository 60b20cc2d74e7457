//! Methods of values as Python has them, where the library for Python's methods lacks them or does otherwise.

use super::bounds::{TEXT_BYTES_MAX, check_braces, check_width, has_brace_width};
use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use std::ops::Range;

/// The engine counts bytes where Python counts characters.
pub(super) const WIDE_TEXT: &str = "a format has a width or a precision for text that is not ASCII, which is not supported";

/// The error of a template that asks for something invalid, with this message.
pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Calls `method` of `value`.
///
/// # Errors
/// The errors that Python raises; an error for a method that is not known.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => of_text(state, text, method, args)?,
        (ValueKind::Seq, _) => of_list(value, method, args)?,
        (ValueKind::Map, _) if method == "get" && args.len() == 2 && args[1].is_undefined() => Some(value.get_item(&args[0])?),
        (ValueKind::Map, _) if method == "copy" => Some(from_args(args).map(|()| value.clone())?),
        (ValueKind::Number, _) if method == "is_integer" && !value.is_integer() => {
            let () = from_args(args)?;
            Some(f64::try_from(value.clone())?.fract().eq(&0.0).into())
        }
        _ => None,
    };
    own.map_or_else(|| minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args), Ok)
}

fn of_list(list: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "copy" => from_args(args).map(|()| list.clone())?,
        "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = list.try_iter()?.position(|item| item == *wanted);
            at.ok_or_else(|| invalid(format!("index: {wanted} is not in the list")))?.into()
        }
        _ => return Ok(None),
    }))
}

/// The method of a text; `None` for one that is as Python's in the library, or unknown.
fn of_text(state: &mut State, text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if !matches!(method, "format" | "join") && args.iter().any(Value::is_undefined) {
        return Err(invalid(format!("{method}: an argument is undefined")));
    }
    Ok(Some(match method {
        "format" => {
            check_braces(text).map_err(invalid)?;
            if has_brace_width(text) && args.iter().any(|arg| !arg.to_string().is_ascii()) {
                return Err(invalid(WIDE_TEXT));
            }
            return Ok(None);
        }
        "split" | "rsplit" => split(text, method == "rsplit", args)?,
        "partition" | "rpartition" => partition(text, method == "rpartition", args)?,
        "removeprefix" => from_args(args).map(|(prefix,): (&str,)| text.strip_prefix(prefix).unwrap_or(text).into())?,
        "removesuffix" => from_args(args).map(|(suffix,): (&str,)| text.strip_suffix(suffix).unwrap_or(text).into())?,
        "find" | "rfind" | "index" | "rindex" => find(text, method, args)?,
        "count" if args.len() > 1 => part(text, args).map(|(part, wanted, _)| part.matches(wanted).count().into())?,
        "startswith" | "endswith" if args.len() > 1 => {
            let (part, wanted, _) = part(text, args)?;
            if method == "endswith" { part.ends_with(wanted).into() } else { part.starts_with(wanted).into() }
        }
        "strip" | "lstrip" | "rstrip" if args.iter().all(Value::is_none) => stripped(text, method).into(),
        "splitlines" => {
            let (keep, options): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = keep.map_or_else(|| options.get::<Option<bool>>("keepends"), |keep| Ok(Some(keep)))?;
            options.assert_all_used()?;
            lines(text, keep.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        "join" => join(state, text, args)?,
        "expandtabs" => {
            let (size, options): (Option<i64>, Kwargs) = from_args(args)?;
            let size = size.map_or_else(|| options.get::<Option<i64>>("tabsize"), |size| Ok(Some(size)))?;
            options.assert_all_used()?;
            expand_tabs(text, usize::try_from(size.unwrap_or(8)).unwrap_or(0))?.into()
        }
        "zfill" => from_args(args).and_then(|(width,): (usize,)| zfill(text, width))?.into(),
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let mut fill = fill.unwrap_or(" ").chars();
            let (Some(fill), None) = (fill.next(), fill.next()) else { return Err(invalid(format!("{method}: a fill is one character"))) };
            let sides = [usize::from(method != "ljust"), usize::from(method != "rjust")];
            pad(text, width, fill, sides)?.into()
        }
        "swapcase" if text.is_ascii() => from_args(args).map(|()| text.chars().map(swapped).collect::<String>().into())?,
        "casefold" if text.is_ascii() => from_args(args).map(|()| text.to_lowercase().into())?,
        "isdecimal" if text.is_ascii() => from_args(args).map(|()| all(text, |c| c.is_ascii_digit()).into())?,
        "isdigit" if text.is_ascii() || !all(text, char::is_numeric) => {
            from_args(args).map(|()| all(text, |c| c.is_ascii_digit()).into())?
        }
        // Unicode has a table of the numbers that are digits; it is not part of this program.
        "isdigit" => return Err(ErrorKind::UnknownMethod.into()),
        "isidentifier" if text.is_ascii() => from_args(args).map(|()| is_identifier(text).into())?,
        "isprintable" if text.is_ascii() => from_args(args).map(|()| text.chars().all(|c| matches!(c, ' '..='~')).into())?,
        _ => return Ok(None),
    }))
}

fn all(text: &str, is_such: impl Fn(char) -> bool) -> bool {
    !text.is_empty() && text.chars().all(is_such)
}

fn is_identifier(text: &str) -> bool {
    all(text, |c| c.is_ascii_alphanumeric() || c == '_') && !text.starts_with(|c: char| c.is_ascii_digit())
}

fn swapped(c: char) -> char {
    if c.is_ascii_uppercase() { c.to_ascii_lowercase() } else { c.to_ascii_uppercase() }
}

/// White space of Python: Unicode's, and four separators of ASCII.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

fn stripped<'a>(text: &'a str, method: &str) -> &'a str {
    let text = if method == "rstrip" { text } else { text.trim_start_matches(is_space) };
    if method == "lstrip" { text } else { text.trim_end_matches(is_space) }
}

fn split(text: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, options): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let named = options.get::<Option<String>>("sep")?;
    let separator = separator.map(String::from).or(named);
    let most = most.map_or_else(|| options.get::<Option<i64>>("maxsplit"), |most| Ok(Some(most)))?;
    options.assert_all_used()?;
    let parts = most.and_then(|most| usize::try_from(most).ok()).map_or(usize::MAX, |most| most.saturating_add(1));
    let mut found: Vec<&str> = match (separator.as_deref(), from_right) {
        (Some(""), _) => return Err(invalid("split: an empty separator")),
        (Some(separator), false) => text.splitn(parts, separator).collect(),
        (Some(separator), true) => text.rsplitn(parts, separator).collect(),
        (None, false) => words(text, parts, str::trim_start_matches, str::find, |text, at| text.split_at(at)),
        (None, true) => words(text, parts, str::trim_end_matches, rfind_end, |text, at| {
            let (rest, word) = text.split_at(at);
            (word, rest)
        }),
    };
    if from_right {
        found.reverse();
    }
    Ok(found.into_iter().map(Value::from).collect())
}

type IsSpace = fn(char) -> bool;

fn rfind_end(text: &str, is_space: IsSpace) -> Option<usize> {
    text.char_indices().rev().find(|(_, c)| is_space(*c)).map(|(at, c)| at + c.len_utf8())
}

/// Words between white space, the last one with all that is left after so many parts.
fn words<'a>(
    text: &'a str,
    parts: usize,
    trim: fn(&'a str, IsSpace) -> &'a str,
    find: fn(&'a str, IsSpace) -> Option<usize>,
    cut: fn(&'a str, usize) -> (&'a str, &'a str),
) -> Vec<&'a str> {
    let (mut rest, mut found) = (trim(text, is_space), Vec::new());
    while !rest.is_empty() {
        let at = find(rest, is_space).filter(|_| found.len() + 1 < parts);
        let Some(at) = at else {
            found.push(rest);
            break;
        };
        let (word, after) = cut(rest, at);
        found.push(word);
        rest = trim(after, is_space);
    }
    found
}

fn partition(text: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(invalid("partition: an empty separator"));
    }
    let found = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Tuple::from(parts.map(Value::from)).into())
}

/// The part of `text` between two places in characters, the pattern to find in it, and the beginning of the part.
fn part<'a>(text: &'a str, args: &'a [Value]) -> Result<(&'a str, &'a str, usize), Error> {
    let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let chars = text.chars().count();
    let place = |place: i64| match usize::try_from(place) {
        Ok(place) => place.min(chars),
        Err(_) => chars.saturating_sub(usize::try_from(place.unsigned_abs()).unwrap_or(chars)),
    };
    let Range { start, end } = start.map_or(0, place)..end.map_or(chars, place);
    let byte = |place: usize| text.char_indices().nth(place).map_or(text.len(), |(at, _)| at);
    Ok((if start <= end { &text[byte(start)..byte(end)] } else { "" }, wanted, start))
}

fn find(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (part, wanted, start) = part(text, args)?;
    let at = if method.starts_with('r') { part.rfind(wanted) } else { part.find(wanted) };
    match at {
        Some(at) => Ok((start + part[..at].chars().count()).into()),
        None if method.ends_with("find") => Ok((-1).into()),
        None => Err(invalid(format!("{method}: {wanted:?} is not in the text"))),
    }
}

/// The lines of `text`, with their ends if asked for; Python ends a line at more than line feeds.
pub(super) fn lines(text: &str, keeps_ends: bool) -> Vec<&str> {
    let is_end = |c: char| matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut rest, mut found) = (text, Vec::new());
    while !rest.is_empty() {
        let at = rest.find(is_end).unwrap_or(rest.len());
        let end = if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(0, char::len_utf8) };
        found.push(&rest[..if keeps_ends { at + end } else { at }]);
        rest = &rest[at + end..];
    }
    found
}

fn join(state: &mut State, separator: &str, args: &[Value]) -> Result<Value, Error> {
    let (items,): (&Value,) = from_args(args)?;
    if items.is_none() {
        return Err(invalid("join: None is no list"));
    }
    let mut out = String::new();
    for (at, item) in items.try_iter()?.enumerate() {
        let text = item.as_str().ok_or_else(|| invalid(format!("join: item {at} is no text, but of type {}", item.kind())))?;
        state.consume_fuel(1 + ((separator.len() + text.len()) / 64) as u64)?;
        out.push_str(if at > 0 { separator } else { "" });
        out.push_str(text);
    }
    Ok(out.into())
}

/// `text` with spaces up to the next multiple of `size` columns for each tab.
fn expand_tabs(text: &str, size: usize) -> Result<String, Error> {
    check_width(size).map_err(invalid)?;
    if text.len().saturating_add(size * text.matches('\t').count()) > TEXT_BYTES_MAX {
        return Err(invalid(format!("expandtabs: more than {TEXT_BYTES_MAX} bytes of text")));
    }
    let (mut out, mut column) = (String::with_capacity(text.len()), 0);
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            _ => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(out)
}

fn zfill(text: &str, width: usize) -> Result<String, Error> {
    check_width(width).map_err(invalid)?;
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let sign = &text[..text.len() - digits.len()];
    Ok(format!("{sign}{}{digits}", "0".repeat(width.saturating_sub(text.chars().count()))))
}

/// `text` of at least so many characters, filled on the left, on the right or on both sides.
///
/// # Errors
/// For a width that is larger than any format's.
pub(super) fn pad(text: &str, width: usize, fill: char, [on_left, on_right]: [usize; 2]) -> Result<String, Error> {
    check_width(width).map_err(invalid)?;
    let missing = width.saturating_sub(text.chars().count());
    let left = match (on_left, on_right) {
        // As CPython rounds it.
        (1, 1) => missing / 2 + (missing & width & 1),
        (1, _) => missing,
        _ => 0,
    };
    let fill = |count: usize| fill.to_string().repeat(count);
    Ok([&fill(left), text, &fill(missing - left)].concat())
}
