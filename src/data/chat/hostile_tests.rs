//! Templates that take the stack, memory or time of the process that compiles and renders them, or make the engine panic: each is an
//! error in a line.

use super::tests::{in_sandbox, turn};
use crate::signals::StopFlag;
use serde_json::json;

const IN_ONE_TAG: &str = "more than 4096 words and signs in one tag";
/// Memory that a slow machine does not fill before the time is over.
const MEMORY_OR_TIME: &str = "takes more than 1.0 GiB of memory | takes more than 2 s of CPU time";
const WIDTH: &str = "a format asks for more than 10000 characters";

/// Each source and words of what becomes of it, where the machine's speed decides more than one, between ` | `; what harms nobody may be
/// rendered.
fn expect(cases: &[(String, &str)]) {
    let chat = json!({"messages": [turn("user", "a"), turn("assistant", "b")]});
    let mut wrong = Vec::new();
    for (source, words) in cases {
        let outcome = in_sandbox(source, &chat, &StopFlag::default());
        let refused = outcome.map_or_else(|e| e.to_string(), |_| "the chat template is rendered".into());
        if !words.split(" | ").any(|words| refused.contains(words)) || refused.contains('\n') {
            wrong.push(format!("{}: {refused}", source.chars().take(60).collect::<String>()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn many(part: &str, count: usize, rest: &str) -> String {
    format!("{{{{ {}{rest} }}}}", part.repeat(count))
}

/// A value that is put together with itself sixty times.
fn grow(x: &str, next: &str, write: &str) -> String {
    format!("{{% set ns = namespace(x={x}) %}}{{% for i in range(60) %}}{{% set ns.x = {next} %}}{{% endfor %}}{{{{ {write} }}}}")
}

#[test]
fn chains_of_each_kind_of_expression_are_refused_by_their_length() {
    expect(&[
        (many("-", 20_000, "1"), IN_ONE_TAG),
        (many("not ", 20_000, "1"), IN_ONE_TAG),
        (many("1+", 20_000, "1"), IN_ONE_TAG),
        (many("1 and ", 20_000, "1"), IN_ONE_TAG),
        (many("1 < ", 20_000, "1"), IN_ONE_TAG),
        (many("1**", 20_000, "1"), IN_ONE_TAG),
        (many("1 if 1 else ", 41_000, "1"), IN_ONE_TAG),
        (many("'a'~", 100_000, "'a'"), IN_ONE_TAG),
        (format!("{{{{ a{} }}}}", ".x".repeat(41_000)), IN_ONE_TAG),
        (format!("{{{{ a{} }}}}", "|abs".repeat(41_000)), IN_ONE_TAG),
        (format!("{{{{ a{} }}}}", "[0]".repeat(41_000)), IN_ONE_TAG),
        (format!("{{{{ a{} }}}}", "()".repeat(41_000)), IN_ONE_TAG),
        (format!("{{{{ a{} }}}}", " is defined".repeat(41_000)), IN_ONE_TAG),
        (format!("{{% set a = {}1 %}}", "-".repeat(20_000)), IN_ONE_TAG),
        (many("[", 20_000, "1"), IN_ONE_TAG),
        (many("{1:", 20_000, "1"), IN_ONE_TAG),
        (many("(", 20_000, "1"), IN_ONE_TAG),
        // As many as are let through.
        (many("-", 4000, "1"), "the chat template"),
        (many("[", 4000, "1"), "recursion"),
    ]);
}

#[test]
fn tags_within_each_other_are_refused() {
    expect(&[
        ("{% if 1 %}".repeat(20_000), "recursion"),
        ("{% for i in a %}".repeat(20_000), "recursion"),
        ("{% macro f() %}".repeat(20_000), "recursion"),
        ("{% call f() %}".repeat(20_000), "recursion"),
        ("{% set x %}".repeat(20_000), "recursion"),
        ("{% filter upper %}".repeat(20_000), "recursion"),
        ("{% with %}".repeat(20_000), "recursion"),
        (format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(20_000)), "more than 1000 tags of elif"),
        ("a".repeat(2 << 20), "at most 1.0 MiB are compiled"),
    ]);
}

#[test]
fn work_that_does_not_end_is_ended() {
    expect(&[
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(), "recursion limit exceeded"),
        ("{% macro f(c) %}{{ c(c) }}{% endmacro %}{{ f(f) }}".into(), "recursion limit exceeded"),
        ("{% for i in range(10**12) %}{% endfor %}".into(), "the chat template"),
        ("{{ range(-2**62, 2**62)|list|length }}".into(), "the chat template"),
        (grow("[1, 2]", "ns.x + ns.x", "ns.x|length"), MEMORY_OR_TIME),
        (grow("'a'", "ns, 'a' ~ ns.x", "ns.x"), "takes more than 64.0 MiB of stack"),
        (grow("'ab'", "ns.x + ns.x", "ns.x|length"), "ran out of fuel"),
        (grow("[1], y=[1]", "[ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y]", "ns.x == ns.y"), "takes more than 2 s of CPU time"),
    ]);
}

#[test]
fn widths_and_precisions_are_bounded_before_they_are_made() {
    expect(&[
        ("{{ '{:>100000000000}'.format('x') }}".into(), WIDTH),
        ("{{ '{:>2000000000}'.format('x') }}".into(), WIDTH),
        ("{{ '{:^99999}'.format('x') }}".into(), WIDTH),
        ("{{ '{:.70000e}'.format(-0.0) }}".into(), WIDTH),
        ("{{ '{:099999999999d}'.format(1) }}".into(), WIDTH),
        ("{{ '%.99999f'|format(2**64) }}".into(), WIDTH),
        ("{{ '%-99999999999s'|format('x') }}".into(), WIDTH),
        ("{{ '%*d'|format(99999999999, 1) }}".into(), "the chat template, line 1"),
        ("{{ 'a'|indent(10**12) }}".into(), "an indent of 1000000000000: at most 1000 spaces are made"),
        ("{{ ('a\n' * 100000)|indent(1000) }}".into(), "indent: more than 4194304 bytes of text"),
        ("{{ ('a\n' * 100000)|indent('b' * 1000) }}".into(), "indent: more than 4194304 bytes of text"),
        ("{{ 'x'|center(10**12) }}".into(), WIDTH),
        ("{{ 'x'.rjust(10**12) }}".into(), WIDTH),
        ("{{ '%99999999999s' % 'x' }}".into(), WIDTH),
        ("{{ '%.99999f' % 2 }}".into(), WIDTH),
        ("{{ ('a' * 10**12)|length }}".into(), "ran out of fuel"),
        ("{{ ([1] * 10**12)|length }}".into(), "repeated sequence is too large"),
        ("{{ 'x'.center(10**12) }}".into(), WIDTH),
        ("{{ 'x'.ljust(10**12) }}".into(), WIDTH),
        ("{{ 'x'.zfill(10**12) }}".into(), WIDTH),
        ("{{ '\\t'.expandtabs(10**12) }}".into(), WIDTH),
        ("{{ ('\\t' * 1000).expandtabs(9999) }}".into(), "of text"),
        ("{{ 'x'|wordwrap(10**12) }}".into(), "is not available here"),
        ("{% for a, b in range(10**12) %}{% endfor %}".into(), "range has too many elements"),
        ("{% for a, b in ['a' * 99999999] %}{% endfor %}".into(), "ran out of fuel"),
        ("{{ 'x'.removeprefix('y')|truncate(10**12) }}".into(), "is rendered"),
        ("{{ [1]|batch(10**12, 'x')|list }}".into(), "ran out of fuel"),
        ("{{ [1]|slice(10**12, 'x')|list }}".into(), "ran out of fuel"),
        ("{{ ('a' * 99999).replace('a', 'a' * 99999) }}".into(), "ran out of fuel"),
        ("{{ ('a' * 999999).join(['b'] * 99999) }}".into(), "ran out of fuel"),
        (
            "{% for i in range(3) %}{{ loop.cycle() }}{% endfor %}".into(),
            "the template library fails on it: attempt to calculate the remainder",
        ),
    ]);
}

#[test]
fn json_is_bounded_before_it_is_made() {
    expect(&[
        ("{{ [[1]]|tojson(indent=4611686018427387904) }}".into(), "an indent of 4611686018427387904: at most 1000 spaces are made"),
        ("{{ [1]|tojson(indent=9223372036854775807) }}".into(), "at most 1000 spaces are made"),
        ("{{ [[1]]|tojson(indent=10000000000) }}".into(), "at most 1000 spaces are made"),
        ("{{ range(9999)|list|tojson(indent=1000) }}".into(), "more than 4194304 bytes of text"),
        (grow("['lol']", "[ns.x, ns.x, ns.x]", "ns.x|tojson"), "tojson: more than 4194304 bytes of text"),
        (grow("1", "[ns.x]", "[ns.x, ns.x]|tojson|length"), "the chat template"),
        (
            "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns|tojson }}".into(),
            "tojson: more than 128 lists and objects within each other",
        ),
    ]);
}
