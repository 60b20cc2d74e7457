//! The secret that the processes of a run share. It never crosses the network: each side proves that it has the token by a keyed hash over
//! two fresh nonces.

use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;

/// Environment variable with the token, used if no file has it.
pub(crate) const TOKEN_VARIABLE: &str = "SUPEROFFLOAD_RUN_TOKEN";

/// Minimum length. A shorter token can be guessed.
const BYTES_MIN: usize = 16;

/// Bytes of a [`Nonce`].
pub(super) const NONCE_BYTES: usize = 16;
/// Block size of SHA-256 in bytes.
const BLOCK_BYTES: usize = 64;

/// Random bytes that one side draws for one connection.
pub(super) type Nonce = [u8; NONCE_BYTES];

/// Proof that a side has the token.
pub(super) type Proof = [u8; 32];

/// The shared secret.
#[derive(Clone)]
pub(crate) struct RunToken(Vec<u8>);

impl fmt::Debug for RunToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a secret")
    }
}

impl RunToken {
    /// The token in `bytes`, which came from `source`. White space around it is removed.
    ///
    /// # Errors
    /// `Usage` if the token is too short to be a secret.
    pub(crate) fn new(bytes: &[u8], source: impl fmt::Display) -> Result<Self> {
        let token = bytes.trim_ascii();
        if token.len() < BYTES_MIN {
            return Err(Error::usage(format!(
                "{source}: a run token of {} bytes can be guessed; use {BYTES_MIN} or more, for example of `openssl rand -hex 16`",
                token.len()
            )));
        }
        Ok(Self(token.to_vec()))
    }

    /// A reason why the token may be guessed although it is long enough.
    pub(crate) fn weakness(&self) -> Option<&'static str> {
        let repeats = self.0.iter().all(|byte| *byte == self.0[0]);
        repeats.then_some("it repeats one byte; take it from `openssl rand -hex 16`")
    }

    /// HMAC-SHA-256 (RFC 2104) of the concatenated `parts`. Both sides must know the length of each part.
    pub(super) fn prove(&self, parts: &[&[u8]]) -> Proof {
        let mut key = [0; BLOCK_BYTES];
        match self.0.len() {
            0..=BLOCK_BYTES => key[..self.0.len()].copy_from_slice(&self.0),
            _ => key[..32].copy_from_slice(&Sha256::digest(&self.0)),
        }
        let keyed = |pad: u8| Sha256::new_with_prefix(key.map(|byte| byte ^ pad));
        let inner = parts.iter().fold(keyed(0x36), |sum, part| sum.chain_update(part)).finalize();
        keyed(0x5c).chain_update(inner).finalize().into()
    }
}

/// Whether two proofs are equal, compared in constant time.
pub(super) fn is_same(one: &Proof, other: &Proof) -> bool {
    one.iter().zip(other).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
}

/// An unpredictable number: the standard library seeds its hasher from the system.
pub(super) fn nonce() -> Nonce {
    let mut nonce = [0; NONCE_BYTES];
    let words = nonce.chunks_mut(8).zip(0..);
    words.for_each(|(word, nth): (&mut [u8], u64)| word.copy_from_slice(&RandomState::new().hash_one(nth).to_le_bytes()));
    nonce
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::checksum::hex;

    #[test]
    fn proofs_are_those_of_the_standard() {
        // RFC 4231, cases 1, 3 and 6: keys shorter and longer than a block.
        let proof = |key: &[u8], parts: &[&[u8]]| hex(RunToken(key.to_vec()).prove(parts));
        assert_eq!(proof(&[0x0b; 20], &[b"Hi ", b"There"]), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
        assert_eq!(proof(&[0xaa; 20], &[&[0xdd; 50]]), "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
        assert_eq!(
            proof(&[0xaa; 131], &[b"Test Using Larger Than Block-Size Key - Hash Key First"]),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"
        );
    }

    #[test]
    fn a_short_token_is_refused_and_none_is_printed() {
        // Six invalid UTF-8 bytes must count as six, and not as the eighteen bytes of their replacement characters.
        for short in [&b" 12345 \n"[..], b"fifteen bytes..", &[0xff; 6]] {
            let refused = RunToken::new(short, TOKEN_VARIABLE).unwrap_err().to_string();
            let words = format!("SUPEROFFLOAD_RUN_TOKEN: a run token of {} bytes can be guessed", short.trim_ascii().len());
            assert!(refused.starts_with(&words), "{refused}");
        }
        let token = RunToken::new(b"0123456789abcdef\n", "here").unwrap();
        assert!(token.0 == b"0123456789abcdef" && !format!("{token:?}").contains("0123"));
    }

    #[test]
    fn tokens_are_bytes_and_one_that_repeats_a_byte_is_weak() {
        let [one, other] = [[0xff; 16], [0x80; 16]].map(|bytes| RunToken::new(&bytes, "here").unwrap());
        assert_ne!(one.prove(&[b"x"]), other.prove(&[b"x"]));
        assert!(one.weakness().is_some() && RunToken::new(b"aaaaaaaaaaaaaaab", "here").unwrap().weakness().is_none());
    }

    #[test]
    fn nonces_differ_and_proofs_are_compared_whole() {
        assert_ne!(nonce(), nonce());
        let (one, mut other) = ([7; 32], [7; 32]);
        assert!(is_same(&one, &other));
        other[31] = 6;
        assert!(!is_same(&one, &other));
    }
}
