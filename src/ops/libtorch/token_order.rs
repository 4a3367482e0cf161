//! Where in a batch each token stands: what the gradients of all embeddings of a batch need, found once.

use super::TchTensor;
use std::sync::{Mutex, PoisonError};
use tch::{Kind, Tensor};

/// The places of a batch's tokens, by token.
pub struct TokenOrder {
    /// Places `[n]`, those of a token side by side and in order.
    pub order: Tensor,
    /// Where each token's places start in `order` `[v + 1]`.
    pub starts: Tensor,
}

/// The latest batch. Holding its tokens keeps their memory from being used for others: the same place is the same batch.
static LATEST: Mutex<Option<(TchTensor, i64, TokenOrder)>> = Mutex::new(None);

/// The order of `tokens` `[b, t]` of a vocabulary of `v`, made anew only for other tokens than the last time.
pub fn token_order(tokens: &TchTensor, v: i64) -> TokenOrder {
    let mut latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    let is_same = |other: &Tensor| {
        let layout = |x: &Tensor| (x.data_ptr(), x.device(), x.size(), x.stride());
        layout(other) == layout(&tokens.tensor)
    };
    if let Some((other, other_v, order)) = latest.as_ref()
        && *other_v == v
        && is_same(&other.tensor)
    {
        return order.shallow_clone();
    }
    let flat = tokens.tensor.reshape([-1]);
    let (sorted, order) = flat.sort_stable(true, 0, false);
    let ids = Tensor::arange(v + 1, (Kind::Int64, flat.device()));
    let starts = ids.searchsorted(&sorted, false, false, "left", None::<Tensor>);
    let made = TokenOrder { order, starts };
    *latest = Some((tokens.clone(), v, made.shallow_clone()));
    made
}

impl TokenOrder {
    fn shallow_clone(&self) -> Self {
        Self { order: self.order.shallow_clone(), starts: self.starts.shallow_clone() }
    }
}
