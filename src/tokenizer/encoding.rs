//! Text to token ids, through `tiktoken-rs`.

use super::split::for_each_piece;
use rustc_hash::FxHashMap;
use tiktoken_rs::{CoreBPE, Rank};

/// Encodes pieces by the ranks of their tokens.
///
/// `tiktoken-rs` merges the pieces; [`for_each_piece`] cuts them, because the backtracking engine
/// inside `tiktoken-rs` takes more than half of its time and panics on a run of about a million
/// spaces.
pub(super) struct Encoder {
    ids: FxHashMap<Vec<u8>, Rank>,
    merges: CoreBPE,
}

/// Takes whatever it is given as one piece.
const WHOLE_PIECE: &str = "(?s)^.+$";

impl Encoder {
    /// `ranks` are the tokens in id order, all single bytes among them.
    pub(super) fn new(ranks: &[Vec<u8>]) -> Self {
        let ids: FxHashMap<Vec<u8>, Rank> = ranks.iter().cloned().zip(0..).collect();
        let merges = CoreBPE::new(ids.clone(), FxHashMap::default(), WHOLE_PIECE)
            .expect("only a wrong expression is refused, and this one is constant");
        Self { ids, merges }
    }

    pub(super) fn encode(&self, text: &str) -> Vec<Rank> {
        // English text has about four bytes a token.
        let mut ids = Vec::with_capacity(text.len() / 3);
        for_each_piece(text, |piece| match self.ids.get(piece.as_bytes()) {
            Some(&id) => ids.push(id),
            None => ids.extend(self.merges.encode_ordinary(piece)),
        });
        ids
    }
}
