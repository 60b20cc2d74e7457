//! Tensors of multi-head latent attention.

use super::{Init, Module, Role, TableBuilder};
use crate::model::layer_shape::{Attn, Latent};

impl TableBuilder<'_> {
    /// Tensors of latent attention, without the norms of the residual stream.
    pub(super) fn latent(&mut self, module: Module, attn: Attn, latent: Latent, at: impl Fn(&str) -> String) {
        let Latent { query_rank, rank, rotary, value } = latent;
        let (channels, init) = (self.shape.channels, self.matrix_init());
        let name = |name: &str| at(&format!("self_attn.{name}.weight"));
        self.whole(module, Role::AttnOut, vec![channels, attn.value_cols()], self.residual_init(), name("o_proj"));
        let rows = attn.heads * (attn.head_dim - rotary + value);
        self.whole(module, Role::LatentKv, vec![rows, rank], init, name("kv_b_proj"));
        self.whole(module, Role::LatentNorm, vec![rank], Init::Ones, name("kv_a_layernorm"));
        self.whole(module, Role::Latent, vec![rank + rotary, channels], init, name("kv_a_proj_with_mqa"));
        let Some(query_rank) = query_rank else {
            return self.whole(module, Role::Qkv, vec![attn.out_cols(), channels], init, name("q_proj"));
        };
        self.whole(module, Role::LatentQueries, vec![attn.out_cols(), query_rank], init, name("q_b_proj"));
        self.whole(module, Role::LatentQueryNorm, vec![query_rank], Init::Ones, name("q_a_layernorm"));
        self.whole(module, Role::Qkv, vec![query_rank, channels], init, name("q_a_proj"));
    }
}
