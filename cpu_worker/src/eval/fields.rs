//! The fields of one JSON object, read as strictly as the contract says.
//!
//! Values are kept as text until they are asked for: a number is then exactly what was written (−0 is an integer and 1.0
//! is not; a score is rounded once; 1e999 is a number, and not a finite one). Of a repeated key the last counts.

use core::fmt;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Why a line is malformed.
#[derive(Debug)]
pub(super) struct BadInput(pub(super) String);

/// One JSON object.
pub(super) struct Fields<'a>(BTreeMap<String, &'a RawValue>);

impl<'a> Fields<'a> {
    pub(super) fn parse_line(line: &'a [u8]) -> Result<Self, BadInput> {
        let text = core::str::from_utf8(line).map_err(|error| BadInput(error.to_string()))?;
        Self::parse(text)
    }

    fn parse(text: &'a str) -> Result<Self, BadInput> {
        serde_json::from_str(text)
            .map(Self)
            .map_err(|error| BadInput(format!("not a JSON object: {error}")))
    }

    fn raw(&self, name: &str) -> Result<&'a str, BadInput> {
        let raw = self
            .0
            .get(name)
            .ok_or_else(|| BadInput(format!("`{name}` is missing")))?;
        Ok(raw.get())
    }

    fn typed<T: Deserialize<'a>>(&self, name: &str) -> Result<T, BadInput> {
        serde_json::from_str(self.raw(name)?).map_err(|error| BadInput(format!("`{name}`: {error}")))
    }

    /// An integer of 0 or more that fits i64.
    pub(super) fn count(&self, name: &str) -> Result<u64, BadInput> {
        let number = integer(self.raw(name)?).map_err(|why| BadInput(format!("`{name}`: {why}")))?;
        u64::try_from(number).map_err(|_| BadInput(format!("`{name}`: {number} is negative")))
    }

    pub(super) fn flag(&self, name: &str) -> Result<bool, BadInput> {
        self.typed(name)
    }

    pub(super) fn text(&self, name: &str) -> Result<String, BadInput> {
        self.typed(name)
    }

    /// A list of integers of any sign that fit i64.
    pub(super) fn integers(&self, name: &str) -> Result<Vec<i64>, BadInput> {
        self.typed::<List<Integer>>(name)
            .map(|list| list.0.into_iter().map(|item| item.0).collect())
    }

    /// A list of integers of 0 or more that fit i64.
    pub(super) fn counts(&self, name: &str) -> Result<Vec<i64>, BadInput> {
        let numbers = self.integers(name)?;
        match numbers.iter().find(|number| **number < 0) {
            Some(number) => Err(BadInput(format!("`{name}`: {number} is negative"))),
            None => Ok(numbers),
        }
    }

    pub(super) fn scores(&self, name: &str) -> Result<Vec<f64>, BadInput> {
        self.typed::<List<Score>>(name)
            .map(|list| list.0.into_iter().map(|item| item.0).collect())
    }

    pub(super) fn object(&self, name: &str) -> Result<Fields<'a>, BadInput> {
        Self::parse(self.raw(name)?)
    }

    pub(super) fn objects(&self, name: &str) -> Result<Vec<Fields<'a>>, BadInput> {
        self.typed::<Vec<&'a RawValue>>(name)?
            .into_iter()
            .map(|raw| Self::parse(raw.get()))
            .collect()
    }
}

/// An integer as JSON writes one: no fraction, no exponent. The text is known to be a JSON value.
fn integer(text: &str) -> Result<i64, String> {
    text.parse()
        .map_err(|_| format!("{} is no integer that fits i64", shortened(text)))
}

/// A number, or one of the three words for what JSON has no number for.
fn score(text: &str) -> Result<f64, String> {
    match text {
        r#""NaN""# => Ok(f64::NAN),
        r#""Infinity""# => Ok(f64::INFINITY),
        r#""-Infinity""# => Ok(f64::NEG_INFINITY),
        // Only a JSON number starts so: the words that Rust reads as numbers are no JSON values.
        _ if text.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => {
            text.parse().map_err(|_| format!("{} is no score", shortened(text)))
        }
        _ => match serde_json::from_str::<String>(text).as_deref() {
            Ok("NaN") => Ok(f64::NAN),
            Ok("Infinity") => Ok(f64::INFINITY),
            Ok("-Infinity") => Ok(f64::NEG_INFINITY),
            _ => Err(format!("{} is no score", shortened(text))),
        },
    }
}

fn shortened(text: &str) -> String {
    const MOST: usize = 40;
    if text.chars().count() <= MOST {
        text.to_owned()
    } else {
        text.chars().take(MOST).chain(['…']).collect()
    }
}

/// An element that is read from its JSON text.
trait Item: Sized {
    fn read(text: &str) -> Result<Self, String>;
}

struct Integer(i64);

impl Item for Integer {
    fn read(text: &str) -> Result<Self, String> {
        integer(text).map(Self)
    }
}

struct Score(f64);

impl Item for Score {
    fn read(text: &str) -> Result<Self, String> {
        score(text).map(Self)
    }
}

struct List<T>(Vec<T>);

impl<'de, T: Item> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements<T>(Vec<T>);
        impl<'de, T: Item> Visitor<'de> for Elements<T> {
            type Value = List<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<List<T>, A::Error> {
                while let Some(raw) = seq.next_element::<&RawValue>()? {
                    self.0.push(T::read(raw.get()).map_err(serde::de::Error::custom)?);
                }
                Ok(List(self.0))
            }
        }
        deserializer.deserialize_seq(Elements(Vec::new()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_is_what_json_writes_as_one_and_fits_i64() {
        assert_eq!(integer("-0"), Ok(0));
        assert_eq!(integer("-9223372036854775808"), Ok(i64::MIN));
        for wrong in [
            "1.0",
            "1e2",
            "9223372036854775808",
            "true",
            "null",
            "\"1\"",
            "[1]",
            "-9223372036854775809",
        ] {
            assert!(integer(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_score_is_rounded_once_and_may_be_out_of_the_range_of_f64() {
        assert_eq!(score("-0.0").map(f64::to_bits), Ok((-0.0_f64).to_bits()));
        assert_eq!(score("0.1"), Ok(0.1));
        assert_eq!(score("1e999"), Ok(f64::INFINITY));
        assert_eq!(score("\"-Infinity\""), Ok(f64::NEG_INFINITY));
        assert_eq!(score(r#""\u0049nfinity""#), Ok(f64::INFINITY));
        for wrong in ["\"nan\"", "\"inf\"", "\"1\"", "true", "null", "[]", "{}", "\"\""] {
            assert!(score(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_last_of_a_repeated_key_counts_and_unknown_keys_are_not_looked_at() {
        let fields = Fields::parse(r#"{"a": true, "b": [1e999, {"c": []}], "a": 2}"#)
            .ok()
            .unwrap();
        assert_eq!(fields.count("a").ok(), Some(2));
        assert!(fields.count("b").is_err() && fields.flag("a").is_err() && fields.count("c").is_err());
    }
}
