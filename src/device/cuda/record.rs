//! Recording and enqueuing a CUDA graph. The engine uses no graphs.

use super::error::check;
use super::graph::{GraphExec, GraphId};
use super::{CudaDevice, Stream};
use crate::error::Result;
use cust::sys;
use std::ptr;

impl CudaDevice {
    /// Records the operations that `enqueue` enqueues on the compute stream, without running them. Spans must be off, and `enqueue` may not
    /// allocate or use another stream.
    ///
    /// # Errors
    /// Errors of `enqueue`; `Resource` when the driver cannot record the graph.
    pub fn record_graph(&mut self, enqueue: impl FnOnce(&mut Self) -> Result<()>) -> Result<GraphId> {
        const THIS_THREAD: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let stream = self.streams[Stream::Compute as usize].0;
        // SAFETY: the stream is live and records nothing yet.
        check(unsafe { sys::cuStreamBeginCapture_v2(stream, THIS_THREAD) }, || "record a CUDA graph".into())?;
        let enqueued = enqueue(self);
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: writes one handle. The stream records until here, even if `enqueue` failed.
        let ended = check(unsafe { sys::cuStreamEndCapture(stream, &mut graph) }, || "end a CUDA graph".into());
        let instantiated = enqueued.and(ended).and_then(|()| {
            // SAFETY: the graph is live; writes one handle.
            let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
            check(status, || "instantiate a CUDA graph".into())
        });
        if !graph.is_null() {
            // SAFETY: made above; the instantiated graph does not need it.
            unsafe { sys::cuGraphDestroy(graph) };
        }
        instantiated?;
        self.graphs.push(GraphExec(executable));
        Ok(GraphId(self.graphs.len() as u32 - 1))
    }

    /// Enqueues a graph on the compute stream.
    ///
    /// # Errors
    /// `Resource` with the driver's message.
    ///
    /// # Panics
    /// If the graph belongs to another device.
    pub fn launch_graph(&mut self, graph: GraphId) -> Result<()> {
        let stream = self.streams[Stream::Compute as usize].0;
        // SAFETY: both are live, and so is the memory that the recorded operations use: it belongs to the device.
        check(unsafe { sys::cuGraphLaunch(self.graphs[graph.0 as usize].0, stream) }, || "launch a CUDA graph".into())
    }
}
