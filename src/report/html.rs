//! HTML text, and a page whose policy forbids all external content.

use crate::units::compact;
use sha2::{Digest, Sha256};
use std::fmt::Display;
use std::path::Path;

/// Beginning of every report. A file with another beginning is not overwritten.
pub(super) const HEAD: &str = "<!doctype html>\n<!-- superoffload report -->\n";
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// Maximum number of characters of a text from a file.
const TEXT_MAX: usize = 300;

/// Escapes `text` for HTML and XML. A very long text is truncated.
pub(super) fn escape(text: impl Display) -> String {
    let text = text.to_string();
    let end = text.char_indices().nth(TEXT_MAX).map(|(end, _)| end);
    escape_whole(&text[..end.unwrap_or(text.len())]) + if end.is_some() { "…" } else { "" }
}

/// Escapes `text` like [`escape`], without truncation. Newlines and tabs are kept.
pub(super) fn escape_whole(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => safe.push(c),
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // XML forbids these characters, or they change the text direction.
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') => {
                safe.push('\u{fffd}')
            }
            c => safe.push(c),
        }
    }
    safe
}

/// The last component of a path, which may be from another machine.
pub(super) fn last_name(path: &str) -> String {
    Path::new(path).file_name().map_or(path.into(), |name| name.to_string_lossy().into_owned())
}

/// Builds a table. The cells are HTML.
pub(super) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let row = |tag: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|cell| format!("<{tag}>{cell}</{tag}>")).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let head = row("th", &head.iter().map(escape).collect::<Vec<_>>());
    let rows: String = rows.iter().map(|cells| row("td", cells)).collect();
    format!("<div class=\"wide\"><table>\n<thead>{head}</thead><tbody>\n{rows}</tbody></table></div>\n")
}

/// Formats a number with a readable number of digits: `2.184`, `0.00031`, `4,412`.
pub(super) fn number(x: f64) -> String {
    match x.abs() {
        _ if !x.is_finite() => "not a number".into(),
        size if size < 1000.0 && x.fract() == 0.0 => format!("{x}"),
        size if size >= 1e15 => compact(format_args!("{x:e}")),
        size if size >= 1000.0 => thousands(x.round()),
        size if size >= 100.0 => format!("{x:.0}"),
        size if size >= 10.0 => format!("{x:.1}"),
        size if size >= 1.0 => format!("{x:.3}"),
        size if size >= 0.01 => format!("{x:.4}"),
        _ => format!("{x:.1e}"),
    }
}

/// Formats a whole number with thousands separators.
fn thousands(x: f64) -> String {
    let digits = format!("{:.0}", x.abs());
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    format!("{}{}", if x < 0.0 { "−" } else { "" }, groups.join(","))
}

/// Builds the whole page. The policy allows the style and the script by their hashes; nothing else can load or run.
pub(super) fn page(title: &str, body: &str) -> String {
    let (style, script) = (source_hash(STYLE), source_hash(SCRIPT));
    let policy = format!("default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'");
    format!(
        "{HEAD}<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}<script>{SCRIPT}</script>\n</body>\n</html>\n",
        escape(title)
    )
}

/// Hash of `source` in the notation of a Content-Security-Policy.
fn source_hash(source: &str) -> String {
    format!("sha256-{}", base64(&Sha256::digest(source)))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let four = |three: &[u8]| {
        let bits = three.iter().fold(0, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - three.len()));
        let digit = |at: usize| if at > three.len() { '=' } else { DIGITS[(bits >> (18 - 6 * at)) as usize & 63].into() };
        (0..4).map(digit).collect::<String>()
    };
    bytes.chunks(3).map(four).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_file_stays_text() {
        assert_eq!(
            escape("<script>alert('a' & \"b\")</script>\0"),
            "&lt;script&gt;alert(&#39;a&#39; &amp; &quot;b&quot;)&lt;/script&gt;\u{fffd}"
        );
        assert_eq!(escape("é".repeat(1000)).chars().count(), TEXT_MAX + 1);
        assert_eq!(escape("a\u{202e}b"), "a\u{fffd}b");
    }

    #[test]
    fn numbers_have_a_readable_length() {
        let shown = [0.0, 5.5e-5, 0.031, 2.1837, 21.55, 123.4, 4412.3, -1234567.0, 1e300, f64::NAN].map(number);
        assert_eq!(shown, ["0", "5.5e-5", "0.0310", "2.184", "21.6", "123", "4,412", "−1,234,567", "1e300", "not a number"]);
    }

    #[test]
    fn base64_is_that_of_the_standard() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("\u{fb}\u{3ff}", "w7vPvw==")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    fn the_policy_names_the_hashes_of_the_page_s_content() {
        let page = page("<title>", "<p>body</p>");
        let between = |begin: &str, end: &str| page.split_once(begin).unwrap().1.split_once(end).unwrap().0.to_string();
        let policy = between("Content-Security-Policy\" content=\"", "\"");
        assert!(policy.starts_with("default-src 'none'; "), "{policy}");
        for (directive, tag) in [("style-src", "style"), ("script-src", "script")] {
            let hash = source_hash(&between(&format!("<{tag}>"), &format!("</{tag}>")));
            assert!(policy.contains(&format!("{directive} '{hash}';")), "{policy}");
        }
        assert!(page.starts_with(HEAD) && page.contains("<title>&lt;title&gt;</title>"));
    }
}
