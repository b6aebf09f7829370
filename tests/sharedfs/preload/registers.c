/* SPDX-License-Identifier: Apache-2.0 */
/*
 * registers.c - preloaded into user-mode Linux: registers of any processor.
 *
 * User-mode Linux 6.1 has 2,696 bytes for a process's extended registers.  A
 * processor with AMX has 11,008, and its Linux sets them only as a whole: it
 * fails with EFAULT where less is given.  So the registers are passed on with
 * zeros behind them.  The header says which registers are in use, and the
 * added ones are not: Linux gives AMX only to processes that request it.
 */
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

/* Linux uses as much of it as it has registers. */
static char registers[16 << 10];
static long (*real)(int, ...);

/* Runs before user-mode Linux uses small stacks of its own. */
__attribute__((constructor)) static void
find_real(void)
{
    real = (long (*)(int, ...))dlsym(RTLD_NEXT, "ptrace");
}

/* One thread calls this: user-mode Linux has one processor. */
long
ptrace(enum __ptrace_request request, ...)
{
    va_list list;
    va_start(list, request);
    int pid = va_arg(list, int);
    void *address = va_arg(list, void *);
    void *data = va_arg(list, void *);
    va_end(list);
    const struct iovec *given = data;
    if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE &&
        given->iov_len <= sizeof registers) {
        memcpy(registers, given->iov_base, given->iov_len);
        memset(registers + given->iov_len, 0,
               sizeof registers - given->iov_len);
        struct iovec whole = {registers, sizeof registers};
        return real(request, pid, address, &whole);
    }
    return real(request, pid, address, data);
}
