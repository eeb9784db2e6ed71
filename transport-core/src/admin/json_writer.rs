//! Writes what serde serializes as one line of JSON, without white space.

use std::fmt::{self, Display, Write};

use serde::Serialize;
use serde::ser::{self, Serializer};

use super::json::push_string;

/// The JSON of a value, as serde_json writes it. Names of members and numbers as keys are strings.
///
/// # Panics
/// If the value's `Serialize` fails. Those of this crate do not.
pub(super) fn to_json(value: &impl Serialize) -> String {
    let mut json = String::new();
    value.serialize(JsonWriter(&mut json)).expect("values of an admin socket serialize");
    json
}

/// A serializer that appends to a text.
struct JsonWriter<'a>(&'a mut String);

/// A list or an object that is being written: how it ends, and whether it has a first member.
struct Members<'a> {
    json: &'a mut String,
    end: &'static str,
    has_first: bool,
}

/// The error of a `Serialize` that gives up.
#[derive(Debug)]
struct Refused(String);

impl<'a> JsonWriter<'a> {
    /// Writes a number, or another value whose text is its JSON.
    fn plain(self, value: impl Display) -> Result<(), Refused> {
        // Writing to a string does not fail.
        let _ = write!(self.0, "{value}");
        Ok(())
    }

    fn float(self, value: f64) -> Result<(), Refused> {
        match value.is_finite() {
            true => self.plain(value),
            false => self.plain("null"),
        }
    }

    fn members(self, begin: &str, end: &'static str) -> Result<Members<'a>, Refused> {
        self.0.push_str(begin);
        Ok(Members { json: self.0, end, has_first: false })
    }

    /// Begins the object with one member by which serde names a variant.
    fn variant(self, variant: &str) -> Self {
        self.0.push('{');
        push_string(self.0, variant);
        self.0.push(':');
        self
    }
}

impl Members<'_> {
    fn element(&mut self, value: &(impl Serialize + ?Sized)) -> Result<(), Refused> {
        self.separate();
        value.serialize(JsonWriter(self.json))
    }

    fn member(&mut self, name: &str, value: &(impl Serialize + ?Sized)) -> Result<(), Refused> {
        self.separate();
        push_string(self.json, name);
        self.json.push(':');
        value.serialize(JsonWriter(self.json))
    }

    fn separate(&mut self) {
        if std::mem::replace(&mut self.has_first, true) {
            self.json.push(',');
        }
    }

    fn finish(self) -> Result<(), Refused> {
        self.json.push_str(self.end);
        Ok(())
    }
}

impl<'a> Serializer for JsonWriter<'a> {
    type Ok = ();
    type Error = Refused;
    type SerializeSeq = Members<'a>;
    type SerializeTuple = Members<'a>;
    type SerializeTupleStruct = Members<'a>;
    type SerializeTupleVariant = Members<'a>;
    type SerializeMap = Members<'a>;
    type SerializeStruct = Members<'a>;
    type SerializeStructVariant = Members<'a>;

    fn serialize_bool(self, value: bool) -> Result<(), Refused> {
        self.plain(value)
    }

    fn serialize_i8(self, value: i8) -> Result<(), Refused> {
        self.plain(value)
    }

    fn serialize_i16(self, value: i16) -> Result<(), Refused> {
        self.plain(value)
    }

    fn serialize_i32(self, value: i32) -> Result<(), Refused> {
        self.plain(value)
    }

    fn serialize_i64(self, value: i64) -> Result<(), Refused> {
        self.plain(value)
    }

    fn serialize_u8(self, value: u8) -> Result<(), Refused> {
        self.plain(value)
    }

    fn serialize_u16(self, value: u16) -> Result<(), Refused> {
        self.plain(value)
    }

    fn serialize_u32(self, value: u32) -> Result<(), Refused> {
        self.plain(value)
    }

    fn serialize_u64(self, value: u64) -> Result<(), Refused> {
        self.plain(value)
    }

    fn serialize_f32(self, value: f32) -> Result<(), Refused> {
        self.float(value.into())
    }

    fn serialize_f64(self, value: f64) -> Result<(), Refused> {
        self.float(value)
    }

    fn serialize_char(self, value: char) -> Result<(), Refused> {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result<(), Refused> {
        push_string(self.0, value);
        Ok(())
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<(), Refused> {
        value.serialize(self)
    }

    fn serialize_none(self) -> Result<(), Refused> {
        self.plain("null")
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Refused> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), Refused> {
        self.plain("null")
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), Refused> {
        self.plain("null")
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), Refused> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), Refused> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Refused> {
        let writer = self.variant(variant);
        value.serialize(JsonWriter(&mut *writer.0))?;
        writer.plain('}')
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Members<'a>, Refused> {
        self.members("[", "]")
    }

    fn serialize_tuple(self, _: usize) -> Result<Members<'a>, Refused> {
        self.members("[", "]")
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Members<'a>, Refused> {
        self.members("[", "]")
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Members<'a>, Refused> {
        self.variant(variant).members("[", "]}")
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Members<'a>, Refused> {
        self.members("{", "}")
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Members<'a>, Refused> {
        self.members("{", "}")
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Members<'a>, Refused> {
        self.variant(variant).members("{", "}}")
    }
}

impl ser::SerializeSeq for Members<'_> {
    type Ok = ();
    type Error = Refused;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refused> {
        self.element(value)
    }

    fn end(self) -> Result<(), Refused> {
        self.finish()
    }
}

impl ser::SerializeTuple for Members<'_> {
    type Ok = ();
    type Error = Refused;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refused> {
        self.element(value)
    }

    fn end(self) -> Result<(), Refused> {
        self.finish()
    }
}

impl ser::SerializeTupleStruct for Members<'_> {
    type Ok = ();
    type Error = Refused;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refused> {
        self.element(value)
    }

    fn end(self) -> Result<(), Refused> {
        self.finish()
    }
}

impl ser::SerializeTupleVariant for Members<'_> {
    type Ok = ();
    type Error = Refused;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refused> {
        self.element(value)
    }

    fn end(self) -> Result<(), Refused> {
        self.finish()
    }
}

impl ser::SerializeMap for Members<'_> {
    type Ok = ();
    type Error = Refused;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Refused> {
        self.separate();
        let key = to_json(&key);
        // The keys of JSON are strings.
        match key.starts_with('"') {
            true => self.json.push_str(&key),
            false => push_string(self.json, &key),
        }
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refused> {
        self.json.push(':');
        value.serialize(JsonWriter(self.json))
    }

    fn end(self) -> Result<(), Refused> {
        self.finish()
    }
}

impl ser::SerializeStruct for Members<'_> {
    type Ok = ();
    type Error = Refused;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        value: &T,
    ) -> Result<(), Refused> {
        self.member(name, value)
    }

    fn end(self) -> Result<(), Refused> {
        self.finish()
    }
}

impl ser::SerializeStructVariant for Members<'_> {
    type Ok = ();
    type Error = Refused;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        value: &T,
    ) -> Result<(), Refused> {
        self.member(name, value)
    }

    fn end(self) -> Result<(), Refused> {
        self.finish()
    }
}

impl ser::Error for Refused {
    fn custom<T: Display>(why: T) -> Self {
        Self(why.to_string())
    }
}

impl Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::engine::trace::WaitReason;

    #[derive(Serialize)]
    enum Kinds {
        Unit,
        Newtype(u8),
        Tuple(i8, char),
        Struct { a: Option<bool>, b: () },
    }

    #[test]
    fn every_kind_of_value_is_json() {
        let all = [Kinds::Unit, Kinds::Newtype(7), Kinds::Tuple(-1, '"'), Kinds::Struct { a: None, b: () }];
        assert_eq!(
            to_json(&all),
            r#"["Unit",{"Newtype":7},{"Tuple":[-1,"\""]},{"Struct":{"a":null,"b":null}}]"#
        );
        assert_eq!(to_json(&BTreeMap::from([(7, "a\n"), (9, "\u{1}")])), r#"{"7":"a\n","9":"\u0001"}"#);
        assert_eq!(
            to_json(&(u64::MAX, f64::NAN, 0.5_f32, Some(true))),
            "[18446744073709551615,null,0.5,true]"
        );
        assert_eq!(to_json(&Duration::from_millis(1500)), r#"{"secs":1,"nanos":500000000}"#);
        let wait = WaitReason::PeerQueue { rail: 1, device: "lo1".into() };
        assert_eq!(
            to_json(&[wait, WaitReason::PeerCopy]),
            r#"[{"PeerQueue":{"rail":1,"device":"lo1"}},"PeerCopy"]"#
        );
    }
}
