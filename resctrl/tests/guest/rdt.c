/* A plugin for QEMU (11 or newer, TCG) that makes an x86 guest believe in Intel RDT: cache allocation with CDP, bandwidth limits and
 * counters of an L3 cache. The guest's kernel is unmodified; it finds the feature by CPUID and programs it by model-specific registers,
 * whose writes QEMU ignores. Nothing is partitioned, and counters only grow.
 *
 * Build: cc -O2 -shared -fPIC -o librdt.so rdt.c
 * Use:   qemu-system-x86_64 -accel tcg -cpu max,vendor=GenuineIntel,level=0x20 -plugin ./librdt.so ...
 *
 * QEMU installs no header for plugins on Debian, so what is used of the interface is declared here; GLib's byte arrays come from QEMU. */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_plugin_register;
typedef struct { uint8_t *data; unsigned len; } GByteArray;
typedef struct { char *data; unsigned len; } GArray;
typedef struct { struct qemu_plugin_register *handle; const char *name, *feature; bool is_readonly; } RegisterInfo;
typedef void (*OnInsn)(unsigned vcpu, void *udata);
enum Access { NO_REGISTERS, READS, WRITES, WRITES_AND_JUMPS };

GByteArray *g_byte_array_new(void);
uint8_t *g_byte_array_free(GByteArray *, int);
GArray *qemu_plugin_get_registers(void);
bool qemu_plugin_read_register(struct qemu_plugin_register *, GByteArray *);
bool qemu_plugin_write_register(struct qemu_plugin_register *, GByteArray *);
void qemu_plugin_set_pc(uint64_t) __attribute__((noreturn));
void qemu_plugin_register_vcpu_init_cb(uint64_t, void (*)(unsigned, void *), void *);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, void (*)(struct qemu_plugin_tb *, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *, void *, size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
bool qemu_plugin_read_memory_vaddr(uint64_t, GByteArray *, size_t);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, OnInsn, enum Access, void *);

__attribute__((visibility("default"))) int qemu_plugin_version = 7;

/* The machine that is shown. */
enum { L3_BITS = 12, L3_SHARED = 0xc00, L3_GROUPS = 16, MB_GROUPS = 8, MB_MIN_PERCENT = 10, COUNTERS = 32, COUNTER_UNIT = 64 << 10 };
enum { VCPUS = 256, INSN_BYTES = 2 };
enum { MSR_QM_EVTSEL = 0xc8d, MSR_QM_CTR = 0xc8e, EVENT_OCCUPANCY = 1 };

enum { RAX, RBX, RCX, RDX, REGISTERS };
static const char *const names[REGISTERS] = { "rax", "rbx", "rcx", "rdx" };
static struct qemu_plugin_register *registers[REGISTERS];
static uint64_t amend_at[VCPUS], selected[VCPUS], moved;

static uint32_t get(int which)
{
    GByteArray *bytes = g_byte_array_new();
    uint32_t value = 0;
    qemu_plugin_read_register(registers[which], bytes);
    memcpy(&value, bytes->data, bytes->len < 4 ? bytes->len : 4);
    g_byte_array_free(bytes, 1);
    return value;
}

static void set(int which, uint32_t value)
{
    uint64_t wide = value;
    GByteArray bytes = { (uint8_t *)&wide, sizeof wide };
    qemu_plugin_write_register(registers[which], &bytes);
}

/* Answers a CPUID in QEMU's place. */
static void answer(uint64_t pc, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    set(RAX, a), set(RBX, b), set(RCX, c), set(RDX, d);
    qemu_plugin_set_pc(pc + INSN_BYTES);
}

static void on_cpuid(unsigned vcpu, void *at)
{
    uint64_t pc = (uintptr_t)at;
    uint32_t leaf = get(RAX), part = get(RCX);
    if (leaf == 7 && part == 0)
        amend_at[vcpu % VCPUS] = pc + INSN_BYTES; /* QEMU's answer, with two bits more */
    if (leaf == 0xf && part == 0)
        answer(pc, 0, COUNTERS - 1, 0, 1 << 1);
    if (leaf == 0xf && part == 1)
        answer(pc, 0, COUNTER_UNIT, COUNTERS - 1, 7);
    if (leaf == 0x10 && part == 0)
        answer(pc, 0, 1 << 1 | 1 << 3, 0, 0);
    if (leaf == 0x10 && part == 1)
        answer(pc, L3_BITS - 1, L3_SHARED, 1 << 2, L3_GROUPS - 1);
    if (leaf == 0x10 && part == 3)
        answer(pc, 100 - MB_MIN_PERCENT - 1, 0, 1 << 2, MB_GROUPS - 1);
    if (leaf == 0xf || leaf == 0x10)
        answer(pc, 0, 0, 0, 0);
}

static void after_cpuid(unsigned vcpu, void *at)
{
    if (amend_at[vcpu % VCPUS] != (uintptr_t)at)
        return;
    amend_at[vcpu % VCPUS] = 0;
    set(RBX, get(RBX) | 1 << 12 | 1 << 15); /* monitoring, allocation */
}

static void on_wrmsr(unsigned vcpu, void *at)
{
    if (get(RCX) == MSR_QM_EVTSEL)
        selected[vcpu % VCPUS] = get(RAX) & 0xff;
}

static void on_rdmsr(unsigned vcpu, void *at)
{
    if (get(RCX) != MSR_QM_CTR)
        return;
    uint64_t count = selected[vcpu % VCPUS] == EVENT_OCCUPANCY ? 1 : __sync_add_and_fetch(&moved, 50);
    set(RAX, count), set(RDX, count >> 32);
    qemu_plugin_set_pc((uintptr_t)at + INSN_BYTES);
}

static bool is_cpuid(const uint8_t *code) { return code[0] == 0x0f && code[1] == 0xa2; }

/* Whether the block before ended in a CPUID. */
static bool begins_after_cpuid(const struct qemu_plugin_insn *first)
{
    GByteArray *before = g_byte_array_new();
    uint64_t at = qemu_plugin_insn_vaddr(first) - INSN_BYTES;
    bool after = qemu_plugin_read_memory_vaddr(at, before, INSN_BYTES) && is_cpuid(before->data);
    g_byte_array_free(before, 1);
    return after;
}

static void on_block(struct qemu_plugin_tb *block, void *unused)
{
    size_t count = qemu_plugin_tb_n_insns(block);
    bool after = count > 0 && begins_after_cpuid(qemu_plugin_tb_get_insn(block, 0));
    for (size_t i = 0; i < count; i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(block, i);
        void *at = (void *)(uintptr_t)qemu_plugin_insn_vaddr(insn);
        uint8_t code[INSN_BYTES] = { 0 };
        if (after)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, after_cpuid, WRITES, at);
        after = false;
        if (qemu_plugin_insn_data(insn, code, INSN_BYTES) != INSN_BYTES || code[0] != 0x0f)
            continue;
        if (is_cpuid(code))
            after = true, qemu_plugin_register_vcpu_insn_exec_cb(insn, on_cpuid, WRITES_AND_JUMPS, at);
        else if (code[1] == 0x30)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_wrmsr, READS, at);
        else if (code[1] == 0x32)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_rdmsr, WRITES_AND_JUMPS, at);
    }
}

static void on_vcpu(unsigned vcpu, void *unused)
{
    GArray *all = qemu_plugin_get_registers();
    const RegisterInfo *known = (const RegisterInfo *)all->data;
    for (unsigned i = 0; i < all->len; i++)
        for (int which = 0; which < REGISTERS; which++)
            if (!strcmp(known[i].name, names[which]))
                registers[which] = known[i].handle;
}

__attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv)
{
    qemu_plugin_register_vcpu_init_cb(id, on_vcpu, 0);
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_block, 0);
    return 0;
}
