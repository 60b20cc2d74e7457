//! Roles of tensors in a model.

/// Name in this program of an output matrix that is not the token embedding.
pub(crate) const HEAD: &str = "lm_head";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Token embedding `[vocab, channels]`.
    Wte,
    /// The trained rows of a frozen token embedding `[tokens, channels]`.
    WteRows,
    /// Position embedding `[max_positions, channels]`.
    Wpe,
    /// Weight of the norm before attention `[channels]`.
    AttnNorm,
    /// Bias of the norm before attention `[channels]`.
    AttnNormBias,
    /// Weight of the norm after attention `[channels]`.
    PostAttnNorm,
    /// Bias of the norm after attention `[channels]`.
    PostAttnNormBias,
    /// Fused query, key and value rows `[(heads + 2 kv_heads) head_dim, channels]`. With a gated softmax, and with a gated delta rule
    /// without [`Role::DeltaGate`], rows of gates come first, as many as the output has channels.
    Qkv,
    QkvBias,
    /// Norm of queries `[head_dim]` or `[heads head_dim]`.
    QNorm,
    /// Norm of keys `[head_dim]` or `[kv_heads head_dim]`.
    KNorm,
    /// Sink score of each query head `[heads]`.
    Sinks,
    /// Projection to the latent vector of keys and values, then to the rotated channels of keys `[rank + rotary, channels]`. With latent
    /// vectors, [`Role::Qkv`] is the projection to queries or to their latent vector.
    Latent,
    /// Norm of the latent vector of keys and values `[rank]`.
    LatentNorm,
    /// Keys and values from their latent vector: by head, key rows, then value rows `[heads (head_dim - rotary + value), rank]`.
    LatentKv,
    /// Norm of the latent vector of queries `[query_rank]`.
    LatentQueryNorm,
    /// Queries from their latent vector `[heads head_dim, query_rank]`.
    LatentQueries,
    /// Gate of a gated delta rule's output `[heads head_dim, channels]`.
    DeltaGate,
    /// Decay of a gated delta rule `[heads, channels]`; without [`Role::DeltaStrength`], `heads` rows of the strength follow.
    DeltaDecay,
    /// Strength of a gated delta rule's updates `[heads, channels]`.
    DeltaStrength,
    /// Taps of the short convolution of queries, keys and values `[(heads + 2 kv_heads) head_dim, 4]`.
    DeltaConv,
    /// Logarithm of each head's rate of decay `[heads]`.
    DeltaRate,
    /// Bias of each head's decay `[heads]`.
    DeltaDecayBias,
    /// Weight of the gated norm of each head `[head_dim]`.
    DeltaNorm,
    /// Factor on the residual stream after the layer `[1]`, which is no parameter: its gradient is zero, so that it never changes.
    LayerScale,
    /// Output projection of attention `[channels, heads head_dim]`, or `[channels, heads value]` with latent vectors.
    AttnOut,
    /// Bias of the output projection `[channels]`.
    AttnOutBias,
    /// Weight of the norm before the MLP `[channels]`.
    MlpNorm,
    /// Bias of the norm before the MLP `[channels]`.
    MlpNormBias,
    /// Weight of the norm after the MLP `[channels]`.
    PostMlpNorm,
    /// Bias of the norm after the MLP `[channels]`.
    PostMlpNormBias,
    /// Router of the experts `[experts, channels]`.
    Router,
    /// Bias of the router `[experts]`.
    RouterBias,
    /// Correction of the experts' scores, in three parts `[3 experts]`: see [`crate::model::correction`].
    Correction,
    /// Factor on the router's normalised input `[channels]`.
    RouterScale,
    /// Factors on the weights of choices `[experts]`.
    ExpertScale,
    /// Weight of the norm before the experts `[channels]`.
    ExpertsNorm,
    /// Weight of the norm after the experts `[channels]`.
    PostExpertsNorm,
    /// Weight of the norm after the shared expert `[channels]`.
    PostSharedNorm,
    /// First matrix of the shared expert, fused gate and up rows `[2 width, channels]`.
    SharedIn,
    /// Second matrix of the shared expert `[channels, width]`.
    SharedOut,
    /// Gate of the shared expert `[1, channels]`.
    SharedGate,
    /// First matrix of the MLP: fused gate and up rows `[2 ffn, channels]`, or `[ffn, channels]`; the matrices of several experts are
    /// concatenated by rows.
    MlpIn,
    MlpInBias,
    /// Second matrix of the MLP `[channels, ffn]`; the matrices of several experts are concatenated by rows.
    MlpOut,
    /// Bias of the second matrix `[channels]`.
    MlpOutBias,
    /// Weight of the final norm `[channels]`.
    FinalNorm,
    /// Bias of the final norm `[channels]`.
    FinalNormBias,
    /// Output matrix `[vocab, channels]` if it is not the token embedding.
    LmHead,
    /// The trained rows of a frozen output matrix `[tokens, channels]` that is not the token embedding.
    LmHeadRows,
}

impl Role {
    pub(crate) fn name(self, gated: bool) -> &'static str {
        match (self, gated) {
            (Self::Wte, _) => "wte",
            (Self::WteRows, _) => "wte.rows",
            (Self::Wpe, _) => "wpe",
            (Self::AttnNorm, _) => "attn_norm",
            (Self::AttnNormBias, _) => "attn_norm.bias",
            (Self::PostAttnNorm, _) => "post_attn_norm",
            (Self::PostAttnNormBias, _) => "post_attn_norm.bias",
            (Self::Qkv, _) => "attn.qkv",
            (Self::QkvBias, _) => "attn.qkv.bias",
            (Self::QNorm, _) => "attn.q_norm",
            (Self::KNorm, _) => "attn.k_norm",
            (Self::Latent, _) => "attn.latent",
            (Self::LatentNorm, _) => "attn.latent_norm",
            (Self::LatentKv, _) => "attn.kv",
            (Self::LatentQueryNorm, _) => "attn.query_norm",
            (Self::LatentQueries, _) => "attn.queries",
            (Self::DeltaGate, _) => "attn.gate",
            (Self::DeltaDecay, _) => "attn.decay",
            (Self::DeltaStrength, _) => "attn.strength",
            (Self::DeltaConv, _) => "attn.conv",
            (Self::DeltaRate, _) => "attn.rate",
            (Self::DeltaDecayBias, _) => "attn.decay.bias",
            (Self::DeltaNorm, _) => "attn.norm",
            (Self::LayerScale, _) => "scale",
            (Self::AttnOut, _) => "attn.out",
            (Self::AttnOutBias, _) => "attn.out.bias",
            (Self::MlpNorm, _) => "mlp_norm",
            (Self::MlpNormBias, _) => "mlp_norm.bias",
            (Self::PostMlpNorm, _) => "post_mlp_norm",
            (Self::PostMlpNormBias, _) => "post_mlp_norm.bias",
            (Self::Router, _) => "mlp.router",
            (Self::RouterBias, _) => "mlp.router.bias",
            (Self::Correction, _) => "mlp.router.correction",
            (Self::RouterScale, _) => "mlp.router.scale",
            (Self::ExpertScale, _) => "mlp.router.expert_scale",
            (Self::ExpertsNorm, _) => "mlp.experts_norm",
            (Self::PostExpertsNorm, _) => "mlp.post_experts_norm",
            (Self::PostSharedNorm, _) => "mlp.post_shared_norm",
            (Self::SharedIn, _) => "mlp.shared.gate_up",
            (Self::SharedOut, _) => "mlp.shared.down",
            (Self::SharedGate, _) => "mlp.shared.gate",
            (Self::Sinks, _) => "attn.sinks",
            (Self::MlpIn, true) => "mlp.gate_up",
            (Self::MlpIn, false) => "mlp.up",
            (Self::MlpInBias, true) => "mlp.gate_up.bias",
            (Self::MlpInBias, false) => "mlp.up.bias",
            (Self::MlpOut, _) => "mlp.down",
            (Self::MlpOutBias, _) => "mlp.down.bias",
            (Self::FinalNorm, _) => "final_norm",
            (Self::FinalNormBias, _) => "final_norm.bias",
            (Self::LmHead, _) => HEAD,
            (Self::LmHeadRows, _) => "lm_head.rows",
        }
    }
}
