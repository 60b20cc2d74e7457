//! The text that ships with the program: thirteen free-software licences, verbatim, each under a line with its name.

/// ASCII, about 236 KB.
pub(crate) const DEMO_TEXT: &str = include_str!("../demo.txt");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_ascii_and_holds_thirteen_licences() {
        assert!(DEMO_TEXT.is_ascii() && DEMO_TEXT.len() > 200_000);
        let titles = DEMO_TEXT.lines().filter(|line| line.starts_with("===== ") && line.ends_with(" ====="));
        assert_eq!(titles.count(), 13);
    }
}
