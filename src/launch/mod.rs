//! Engines on this machine, for train, bench and probe: [`devices`] chooses, [`engine`] makes the engine on what was chosen, [`gpu`] is
//! the GPU of builds that have one, [`open`] makes devices, [`context`] checks a sequence length against the model, [`peer_links`]
//! says what lies between GPUs, [`processes`] is for several processes, which have what [`partners`] says, and agree in [`agreement`].

pub(crate) mod agreement;
pub(crate) mod context;
pub(crate) mod devices;
pub(crate) mod engine;
pub(crate) mod gpu;
pub(crate) mod open;
pub(crate) mod partners;
pub(crate) mod peer_links;
pub(crate) mod processes;
pub(crate) mod ranks;
pub(crate) mod share;
