//! Runs the hand-written PTX without a GPU, for tests: warp by warp, instruction by instruction.
//!
//! The emulator supports the instructions of these kernels and panics at all others, including arithmetic without an explicit
//! rounding mode. Accesses must be aligned and stay inside allocations.

use crate::device::DeviceSlice;
use crate::device::cuda::launch::{Arg, LaunchConfig};
use crate::dtype::Dtype;
use half::{bf16, f16};
use std::collections::HashMap;
use std::ops::Range;

/// First address of device memory, and the bytes between allocations.
const BASE: u64 = 1 << 20;
const GUARD: [u8; 64] = [0xa5; 64];

/// Threads of a warp.
const WARP: usize = 32;

#[derive(Default)]
pub(super) struct EmulatedMemory {
    bytes: Vec<u8>,
    owned: Vec<Range<usize>>,
}

impl EmulatedMemory {
    /// Allocates memory with `values`, beginning `offset` elements after a multiple of 16 bytes.
    pub(super) fn with<T: bytemuck::Pod>(&mut self, dtype: Dtype, offset: usize, values: &[T]) -> DeviceSlice {
        assert_eq!(size_of::<T>(), dtype.bytes());
        let start = self.bytes.len().next_multiple_of(16) + GUARD.len() + offset * dtype.bytes();
        self.bytes.resize(start, GUARD[0]);
        self.bytes.extend_from_slice(bytemuck::cast_slice(values));
        self.owned.push(start..self.bytes.len());
        self.bytes.extend_from_slice(&GUARD);
        DeviceSlice::at(BASE + start as u64, values.len(), dtype)
    }

    pub(super) fn read<T: bytemuck::Pod>(&self, slice: DeviceSlice) -> Vec<T> {
        let start = (slice.addr() - BASE) as usize;
        self.bytes[start..start + slice.bytes()].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// Writes `values` to the beginning of `slice`.
    pub(super) fn write<T: bytemuck::Pod>(&mut self, slice: DeviceSlice, values: &[T]) {
        let start = (slice.addr() - BASE) as usize;
        self.bytes[start..start + size_of_val(values)].copy_from_slice(bytemuck::cast_slice(values));
    }

    fn at(&mut self, addr: u64, bytes: usize) -> &mut [u8] {
        let start = addr.checked_sub(BASE).expect("an address below all memory") as usize;
        let inside = |owned: &Range<usize>| owned.start <= start && start + bytes <= owned.end;
        assert!(self.owned.iter().any(inside), "access to {bytes} bytes at {addr:#x}, outside");
        assert!(addr.is_multiple_of(bytes as u64), "access to {bytes} bytes at {addr:#x}, not aligned");
        &mut self.bytes[start..start + bytes]
    }
}

enum PtxOperand {
    Register(usize),
    Immediate(u64),
    Address(usize, u64),
    Param(usize),
    Label(String),
    Group(Vec<PtxOperand>),
}

struct Instruction<'a> {
    /// The predicate register, and the value for which the instruction runs.
    guard: Option<(usize, bool)>,
    /// Opcode and modifiers; the last modifier is the type.
    op: Vec<&'a str>,
    operands: Vec<PtxOperand>,
}

struct EmulatedKernel<'a> {
    threads: u32,
    params: Vec<&'a str>,
    registers: HashMap<&'a str, usize>,
    code: Vec<Instruction<'a>>,
    labels: HashMap<&'a str, usize>,
}

impl<'a> EmulatedKernel<'a> {
    fn parse(ptx: &'a str, name: &str) -> Self {
        let start = ptx.find(&format!(".visible .entry {name}(")).unwrap_or_else(|| panic!("no kernel {name}"));
        let (head, rest) = ptx[start..].split_once("\n{\n").unwrap();
        let (body, _) = rest.split_once("\n}").unwrap();
        let params = head.lines().filter(|line| line.contains(".param")).map(|line| word(line, 2)).collect();
        let threads = head.lines().find(|line| line.starts_with(".reqntid")).map(|line| word(line, 1).parse().unwrap()).unwrap();
        let mut kernel = Self { threads, params, registers: HashMap::new(), code: Vec::new(), labels: HashMap::new() };
        for line in body.lines().map(|line| line.split("//").next().unwrap().trim()) {
            match line.strip_suffix(':') {
                Some(label) => drop(kernel.labels.insert(label, kernel.code.len())),
                None => line.split(';').map(str::trim).filter(|s| !s.is_empty() && !s.starts_with(".reg")).for_each(|s| kernel.push(s)),
            }
        }
        kernel
    }

    fn push(&mut self, statement: &'a str) {
        let (guard, statement) = match statement.strip_prefix('@') {
            Some(rest) => {
                let (predicate, rest) = rest.split_once(' ').unwrap();
                let name = predicate.trim_start_matches('!');
                (Some((self.register(name), name == predicate)), rest.trim())
            }
            None => (None, statement),
        };
        let (op, operands) = statement.split_once(char::is_whitespace).unwrap_or((statement, ""));
        let operands = split_operands(operands).into_iter().map(|text| self.operand(text)).collect();
        self.code.push(Instruction { guard, op: op.split('.').collect(), operands });
    }

    fn register(&mut self, name: &'a str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name).or_insert(next)
    }

    fn operand(&mut self, text: &'a str) -> PtxOperand {
        if let Some(group) = text.strip_prefix('{') {
            let inner = split_operands(group.strip_suffix('}').unwrap());
            return PtxOperand::Group(inner.into_iter().map(|text| self.operand(text)).collect());
        }
        if let Some(address) = text.strip_prefix('[') {
            let (base, offset) = address.strip_suffix(']').unwrap().split_once('+').unwrap_or((address.strip_suffix(']').unwrap(), "0"));
            return match self.params.iter().position(|param| *param == base) {
                Some(param) => PtxOperand::Param(param),
                None => PtxOperand::Address(self.register(base), offset.parse().unwrap()),
            };
        }
        let immediate = match text.get(..2) {
            Some("0f" | "0x") => u64::from_str_radix(&text[2..], 16).ok(),
            _ => text.parse().ok(),
        };
        match immediate {
            Some(value) => PtxOperand::Immediate(value),
            None if text.starts_with('%') => PtxOperand::Register(self.register(text)),
            None => PtxOperand::Label(text.into()),
        }
    }
}

fn word(line: &str, index: usize) -> &str {
    line.split_whitespace().nth(index).unwrap().trim_end_matches(',')
}

/// Splits at commas outside braces.
fn split_operands(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let outside = move |c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    };
    text.split(outside).map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// Runs the kernel `name` of `ptx`.
pub(super) fn run(memory: &mut EmulatedMemory, ptx: &str, name: &str, launch: LaunchConfig, args: &[Arg]) {
    let kernel = EmulatedKernel::parse(ptx, name);
    assert_eq!((launch.block, launch.shared_bytes), ([kernel.threads, 1, 1], 0), "{name}");
    assert_eq!(kernel.params.len(), args.len(), "{name}");
    let args: Vec<u64> = args.iter().map(|arg| arg.0).collect();
    for block in 0..launch.grid[0] {
        for warp in (0..kernel.threads).step_by(WARP) {
            let threads = warp..kernel.threads.min(warp + WARP as u32);
            let specials = |thread| [("%tid.x", thread), ("%ctaid.x", block), ("%nctaid.x", launch.grid[0])];
            run_warp(threads.map(|t| Thread::new(&kernel, &args, &specials(t))).collect(), memory);
        }
    }
}

fn run_warp(mut threads: Vec<Thread<'_>>, memory: &mut EmulatedMemory) {
    loop {
        for thread in &mut threads {
            while thread.step(memory) {}
        }
        if threads.iter().all(|thread| thread.done) {
            return;
        }
        assert!(threads.iter().all(|thread| !thread.done && thread.pc == threads[0].pc), "a shuffle without the whole warp");
        let [PtxOperand::Register(to), PtxOperand::Register(from), distance, ..] = &threads[0].kernel.code[threads[0].pc].operands[..]
        else {
            panic!("a shuffle of registers only");
        };
        let distance = threads[0].value(distance) as usize;
        let values: Vec<u64> = threads.iter().map(|thread| thread.registers[*from]).collect();
        for (lane, thread) in threads.iter_mut().enumerate() {
            thread.registers[*to] = values[lane ^ distance];
            thread.pc += 1;
        }
    }
}

struct Thread<'a> {
    kernel: &'a EmulatedKernel<'a>,
    args: &'a [u64],
    registers: Vec<u64>,
    pc: usize,
    done: bool,
}

impl<'a> Thread<'a> {
    fn new(kernel: &'a EmulatedKernel<'a>, args: &'a [u64], specials: &[(&str, u32)]) -> Self {
        // A register that is read before it is written must not look like zero.
        let mut registers = vec![0xdead_beef_7fc1_2345; kernel.registers.len()];
        for (name, value) in specials {
            if let Some(&register) = kernel.registers.get(name) {
                registers[register] = u64::from(*value);
            }
        }
        Self { kernel, args, registers, pc: 0, done: false }
    }

    fn value(&self, operand: &PtxOperand) -> u64 {
        match operand {
            PtxOperand::Register(register) => self.registers[*register],
            PtxOperand::Immediate(value) => *value,
            PtxOperand::Param(param) => self.args[*param],
            PtxOperand::Address(register, offset) => self.registers[*register].wrapping_add(*offset),
            PtxOperand::Label(_) | PtxOperand::Group(_) => panic!("not a value"),
        }
    }

    fn float(&self, operand: &PtxOperand) -> f32 {
        f32::from_bits(self.value(operand) as u32)
    }

    fn set(&mut self, operand: &PtxOperand, ty: &str, value: u64) {
        let PtxOperand::Register(register) = operand else { panic!("not a register") };
        self.registers[*register] = if width(ty) == 64 { value } else { value & ((1 << width(ty)) - 1) };
    }

    /// Runs one instruction. Returns false at a shuffle, which needs the whole warp, and when the thread has ended.
    fn step(&mut self, memory: &mut EmulatedMemory) -> bool {
        let kernel = self.kernel;
        let Instruction { guard, op, operands } = &kernel.code[self.pc];
        if guard.is_some_and(|(predicate, wanted)| (self.registers[predicate] == 1) != wanted) {
            self.pc += 1;
            return true;
        }
        match (op[0], &operands[..]) {
            ("ret", _) => self.done = true,
            ("shfl", _) => {
                assert_eq!(op[1..], ["sync", "bfly", "b32"]);
                return false;
            }
            ("bra", [PtxOperand::Label(label)]) => {
                self.pc = kernel.labels[&label[..]];
                return true;
            }
            ("ld", [to, PtxOperand::Param(param)]) => self.set(to, op[op.len() - 1], self.args[*param]),
            ("ld", [to, from]) => self.load(memory, op, to, self.value(from)),
            ("st", [to, from]) => self.store(memory, op, self.value(to), from),
            ("mov", [to, from]) => self.mov(op[1], to, from),
            (_, [to, inputs @ ..]) => {
                let value = self.compute(op, inputs);
                let ty = match op[0] {
                    "setp" => "pred",
                    "mul" if op[1] == "wide" => "u64",
                    "cvt" => op[op.len() - 2],
                    _ => op[op.len() - 1],
                };
                self.set(to, ty, value);
            }
            _ => panic!("unknown instruction {op:?}"),
        }
        self.pc += 1;
        !self.done
    }

    fn load(&mut self, memory: &mut EmulatedMemory, op: &[&str], to: &PtxOperand, addr: u64) {
        let ty = op[op.len() - 1];
        let parts = members(to);
        let bytes = width(ty) as usize / 8;
        let loaded = memory.at(addr, bytes * parts.len()).to_vec();
        for (part, loaded) in parts.iter().zip(loaded.chunks(bytes)) {
            let value = loaded.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
            self.set(part, ty, value);
        }
    }

    fn store(&self, memory: &mut EmulatedMemory, op: &[&str], addr: u64, from: &PtxOperand) {
        let parts = members(from);
        let bytes = width(op[op.len() - 1]) as usize / 8;
        let stored = memory.at(addr, bytes * parts.len());
        for (part, stored) in parts.iter().zip(stored.chunks_mut(bytes)) {
            stored.copy_from_slice(&self.value(part).to_le_bytes()[..bytes]);
        }
    }

    fn mov(&mut self, ty: &str, to: &PtxOperand, from: &PtxOperand) {
        match (to, from) {
            (PtxOperand::Group(halves), _) => {
                let value = self.value(from);
                for (i, half) in halves.iter().enumerate() {
                    self.set(half, "b16", value >> (16 * i));
                }
            }
            (_, PtxOperand::Group(halves)) => {
                let value = halves.iter().rev().fold(0, |value, half| value << 16 | self.value(half));
                self.set(to, ty, value);
            }
            _ => self.set(to, ty, self.value(from)),
        }
    }

    /// Evaluates an instruction without side effects.
    fn compute(&self, op: &[&str], inputs: &[PtxOperand]) -> u64 {
        let int = |i: usize| self.value(&inputs[i]);
        let float = |i: usize| self.float(&inputs[i]);
        match op {
            ["cvta", "to", "global", "u64"] | ["cvt", "u64", "u32"] | ["cvt", "u32", "u64"] => int(0),
            ["cvt", "f32", "f16"] => canonical(f16::from_bits(int(0) as u16).to_f32()),
            ["cvt", "rn", format, "f32"] => match format.strip_suffix("x2") {
                Some(format) => narrow(format, float(0)) << 16 | narrow(format, float(1)),
                None => narrow(format, float(0)),
            },
            ["mul", "wide", "u32"] => int(0) * int(1),
            ["mul", "lo", "u32" | "u64"] => int(0).wrapping_mul(int(1)),
            ["mad", "lo", "u64"] => int(0).wrapping_mul(int(1)).wrapping_add(int(2)),
            ["add", "u64" | "u32"] => int(0).wrapping_add(int(1)),
            ["div", "u32"] => int(0) / int(1),
            ["rem", "u32"] => int(0) % int(1),
            ["sub", "s64" | "u32"] => int(0).wrapping_sub(int(1)),
            ["shl", "b32" | "b64"] => int(0) << int(1),
            ["shr", "u32" | "u64"] => int(0) >> int(1),
            ["shr", "s32"] => (int(0) as i32 >> int(1)) as u64,
            ["min", "u32"] => int(0).min(int(1)),
            ["max", "u32"] => int(0).max(int(1)),
            ["and", "b32" | "pred"] => int(0) & int(1),
            ["or", "b32"] => int(0) | int(1),
            ["xor", "b32"] => int(0) ^ int(1),
            ["selp", "b32" | "b64"] => int(if int(2) == 1 { 0 } else { 1 }),
            ["setp", "nan", "f32"] => u64::from(float(0).is_nan() || float(1).is_nan()),
            ["setp", "ge", "f32"] => u64::from(float(0) >= float(1)),
            ["setp", "eq", "u32"] => u64::from(int(0) == int(1)),
            ["setp", "ne", "u32" | "u64"] => u64::from(int(0) != int(1)),
            ["setp", "lt", "u64"] => u64::from(int(0) < int(1)),
            ["setp", "ge", "u64"] => u64::from(int(0) >= int(1)),
            ["setp", "gt", "s64"] => u64::from(int(0) as i64 > int(1) as i64),
            ["abs", "f32"] => canonical(float(0).abs()),
            ["add", "rn", "f32"] => canonical(float(0) + float(1)),
            ["mul", "rn", "f32"] => canonical(float(0) * float(1)),
            ["div", "rn", "f32"] => canonical(float(0) / float(1)),
            ["sqrt", "rn", "f32"] => canonical(float(0).sqrt()),
            ["fma", "rn", "f32"] => canonical(float(0).mul_add(float(1), float(2))),
            _ => panic!("unknown instruction {op:?}"),
        }
    }
}

fn members(operand: &PtxOperand) -> &[PtxOperand] {
    match operand {
        PtxOperand::Group(members) => members,
        single => std::slice::from_ref(single),
    }
}

/// Bits of a type.
fn width(ty: &str) -> u32 {
    match ty {
        "pred" => 1,
        "u8" => 8,
        "b16" | "bf16" | "f16" => 16,
        "b32" | "u32" | "s32" | "f32" | "bf16x2" | "f16x2" => 32,
        "b64" | "u64" | "s64" => 64,
        _ => panic!("unknown type {ty}"),
    }
}

/// Arithmetic on a GPU produces a single NaN value.
fn canonical(x: f32) -> u64 {
    u64::from(if x.is_nan() { 0x7fff_ffff } else { x.to_bits() })
}

fn narrow(format: &str, x: f32) -> u64 {
    u64::from(match format {
        _ if x.is_nan() => 0x7fff,
        "bf16" => bf16::from_f32(x).to_bits(),
        "f16" => f16::from_f32(x).to_bits(),
        _ => panic!("unknown format {format}"),
    })
}
