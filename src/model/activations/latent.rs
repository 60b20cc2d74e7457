//! Memory of the latent vectors of latent attention.

use super::ActivationPlan;
use crate::error::Result;
use crate::model::activation_arrays::LatentActivations;
use crate::model::layer_shape::Latent;
use crate::model::sized_allocator::SizedAllocator;

impl ActivationPlan {
    /// Latent vectors of each layer.
    pub(super) fn latent(&self, memory: &mut SizedAllocator<'_>) -> Result<Vec<LatentActivations>> {
        let costly = self.parts(|l| self.policies[l].keeps_costly());
        let cheap = self.parts(|l| self.policies[l].keeps_cheap());
        let mut each = |name, parts, cols: fn(Latent) -> usize| {
            let cols = self.shape.layers.iter().map(|layer| layer.attn.latent().map_or(0, cols)).collect();
            memory.by_layer(name, parts, cols, self.dtype)
        };
        let raw = each("layers.latent_raw", &costly, |latent| latent.rank)?;
        let key = each("layers.latent_key", &costly, |latent| latent.rotary)?;
        let normed = each("layers.latent_norm_out", &cheap, |latent| latent.rank)?;
        let queries = each("layers.query_norm_out", &cheap, |latent| latent.query_rank.unwrap_or(0))?;
        let layer = |l: usize| LatentActivations { raw: raw.at(l), key: key.at(l), normed: normed.at(l), queries: queries.at(l) };
        Ok((0..self.policies.len()).map(layer).collect())
    }
}
