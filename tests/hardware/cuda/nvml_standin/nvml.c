/* A stand-in for NVIDIA's libnvidia-ml.so.1: the calls that splittune makes through pynvml, over cards from a text file.
 *
 * The file is named `state`, lies beside this library, and is read anew at every call, so that a test may change the
 * cards half-way. Every call appends its name to the file `calls` beside it. standin.py writes the one and reads the
 * other; a line of the state is one of
 *
 *     driver VERSION
 *     card uuid=U bus=B total=N free=N used=N reserved=N [mig=0|1] [clock=MHZ] [temperature=C] [reasons=BITS]
 *     instance uuid=U total=N free=N used=N reserved=N       a MIG instance of the card above
 *     name TEXT                                              of the card or instance above
 *     process pid=N drawing=0|1 [used=N]                     on it; without `used` the driver does not tell
 *     silent drawing=0|1                                     on it: which of its two lists the driver does not give
 *     fail CALL CODE                                         what this call answers
 *     hang CALL                                              does not return for as long as this line is there
 *     die N                                                  after N calls every call says that the GPU is lost
 *
 * Compiled with -DOLD_DRIVER it lacks the calls that NVML renamed or versioned later.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15
};

typedef unsigned long long u64;

/* NVML's own structures, field by field. */
struct memory { u64 total, free, used; };
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
struct process_info { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; };
struct pci_info { char bus_legacy[16]; unsigned domain, bus, device, pci_device, pci_subsystem; char bus_id[32]; };

#define NOT_TOLD (~0ULL)
#define MAX 16

struct process { unsigned pid; u64 used; int drawing; };
struct device {
    int parent; /* the card that an instance is part of, by its place; -1 for a card */
    char uuid[96], bus[32], name[96];
    u64 total, free, used, reserved, mig, clock, temperature, reasons;
    int silent[2], num_processes;
    struct process processes[MAX];
};
struct trouble { char call[64]; int code; };
struct state {
    char driver[80];
    int num_devices, num_failing, num_hanging;
    struct device devices[MAX];
    struct trouble failing[MAX], hanging[MAX];
    u64 dies_after;
};

static u64 num_calls;
static int num_connections;

static FILE *beside_library(const char *name, const char *mode)
{
    char path[4096];
    Dl_info here;
    if (!dladdr((void *)beside_library, &here))
        return NULL;
    snprintf(path, sizeof path, "%s", here.dli_fname);
    char *slash = strrchr(path, '/');
    if (slash == NULL || strlen(name) >= sizeof path - (slash + 1 - path))
        return NULL;
    strcpy(slash + 1, name);
    return fopen(path, mode);
}

static const char *text_of(const char *line, const char *key, char *value, size_t size)
{
    const char *found = strstr(line, key);
    if (found == NULL)
        return NULL;
    snprintf(value, size, "%.*s", (int)strcspn(found + strlen(key), " \n"), found + strlen(key));
    return value;
}

static u64 number_of(const char *line, const char *key)
{
    char value[32];
    return text_of(line, key, value, sizeof value) ? strtoull(value, NULL, 0) : NOT_TOLD;
}

static void read_device(struct state *state, const char *line, int is_card, int *card)
{
    if (state->num_devices == MAX)
        return;
    struct device *device = &state->devices[state->num_devices];
    if (is_card)
        *card = state->num_devices;
    device->parent = is_card ? -1 : *card;
    text_of(line, " uuid=", device->uuid, sizeof device->uuid);
    text_of(line, " bus=", device->bus, sizeof device->bus);
    device->total = number_of(line, " total=");
    device->free = number_of(line, " free=");
    device->used = number_of(line, " used=");
    device->reserved = number_of(line, " reserved=");
    device->mig = number_of(line, " mig=");
    device->clock = number_of(line, " clock=");
    device->temperature = number_of(line, " temperature=");
    device->reasons = number_of(line, " reasons=");
    state->num_devices++;
}

static void read_state(struct state *state)
{
    char line[512];
    int card = -1;
    memset(state, 0, sizeof *state);
    state->dies_after = NOT_TOLD;
    FILE *file = beside_library("state", "r");
    if (file == NULL)
        return; /* its test is over: no cards, no trouble */
    while (fgets(line, sizeof line, file)) {
        struct device *last = state->num_devices ? &state->devices[state->num_devices - 1] : NULL;
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "driver ", 7))
            snprintf(state->driver, sizeof state->driver, "%s", line + 7);
        else if (!strncmp(line, "card ", 5))
            read_device(state, line, 1, &card);
        else if (!strncmp(line, "instance ", 9))
            read_device(state, line, 0, &card);
        else if (!strncmp(line, "name ", 5) && last)
            snprintf(last->name, sizeof last->name, "%s", line + 5);
        else if (!strncmp(line, "process ", 8) && last && last->num_processes < MAX)
            last->processes[last->num_processes++] = (struct process){
                (unsigned)number_of(line, " pid="), number_of(line, " used="), (int)number_of(line, " drawing=")};
        else if (!strncmp(line, "silent ", 7) && last)
            last->silent[number_of(line, " drawing=") == 1] = 1;
        else if (!strncmp(line, "fail ", 5) && state->num_failing < MAX)
            state->num_failing += 2 == sscanf(line, "fail %63s %d", state->failing[state->num_failing].call,
                                              &state->failing[state->num_failing].code);
        else if (!strncmp(line, "hang ", 5) && state->num_hanging < MAX)
            state->num_hanging += 1 == sscanf(line, "hang %63s", state->hanging[state->num_hanging].call);
        else if (!strncmp(line, "die ", 4))
            state->dies_after = strtoull(line + 4, NULL, 10);
    }
    fclose(file);
}

static const struct trouble *trouble_of(const struct trouble *troubles, int num_troubles, const char *call)
{
    for (int i = 0; i < num_troubles; i++)
        if (!strcmp(troubles[i].call, call))
            return &troubles[i];
    return NULL;
}

/* What every call begins with: its name is noted, and it hangs or fails where the state says so. */
static int enter(struct state *state, const char *call)
{
    const struct timespec nap = {0, 10 * 1000 * 1000};
    FILE *calls = beside_library("calls", "a");
    if (calls != NULL) {
        fprintf(calls, "%s\n", call);
        fclose(calls);
    }
    u64 number = __atomic_add_fetch(&num_calls, 1, __ATOMIC_SEQ_CST);
    read_state(state);
    while (trouble_of(state->hanging, state->num_hanging, call)) {
        nanosleep(&nap, NULL);
        read_state(state);
    }
    const struct trouble *failing = trouble_of(state->failing, state->num_failing, call);
    if (failing != NULL)
        return failing->code;
    if (number > state->dies_after)
        return GPU_IS_LOST;
    if (strcmp(call, "nvmlInitWithFlags") && __atomic_load_n(&num_connections, __ATOMIC_SEQ_CST) == 0)
        return UNINITIALIZED;
    return SUCCESS;
}

/* A handle is a device's place in the state, counted from 1: to a caller it is a pointer that means nothing. */
static void *handle_of(int place) { return (void *)(size_t)(place + 1); }

static struct device *device_of(struct state *state, void *handle)
{
    size_t number = (size_t)handle;
    return number >= 1 && number <= (size_t)state->num_devices ? &state->devices[number - 1] : NULL;
}

#define ENTER(call)                                                                                                    \
    struct state state;                                                                                                \
    int code = enter(&state, #call);                                                                                   \
    if (code != SUCCESS)                                                                                               \
        return code;

#define ENTER_DEVICE(call)                                                                                             \
    ENTER(call)                                                                                                        \
    struct device *device = device_of(&state, handle);                                                                 \
    if (device == NULL)                                                                                                \
        return INVALID_ARGUMENT;

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    ENTER(nvmlInitWithFlags)
    __atomic_add_fetch(&num_connections, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int nvmlShutdown(void)
{
    ENTER(nvmlShutdown)
    __atomic_sub_fetch(&num_connections, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    (void)code;
    return "an error that pynvml has no words for";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    ENTER(nvmlSystemGetDriverVersion)
    snprintf(version, length, "%s", state.driver);
    return SUCCESS;
}

/* NVML counts cards, not instances. */
static int place_of_card(const struct state *state, unsigned index)
{
    for (int place = 0; place < state->num_devices; place++)
        if (state->devices[place].parent < 0 && index-- == 0)
            return place;
    return -1;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER(nvmlDeviceGetCount_v2)
    for (*count = 0; place_of_card(&state, *count) >= 0;)
        ++*count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    ENTER(nvmlDeviceGetHandleByIndex_v2)
    int place = place_of_card(&state, index);
    *handle = handle_of(place);
    return place < 0 ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    ENTER(nvmlDeviceGetHandleByUUID)
    for (int place = 0; place < state.num_devices; place++)
        if (!strcmp(state.devices[place].uuid, uuid)) {
            *handle = handle_of(place);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle)
{
    ENTER(nvmlDeviceGetHandleByPciBusId_v2)
    for (int place = 0; place < state.num_devices; place++)
        if (state.devices[place].parent < 0 && !strcasecmp(state.devices[place].bus, bus)) {
            *handle = handle_of(place);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    ENTER_DEVICE(nvmlDeviceGetMigMode)
    if (device->mig == NOT_TOLD)
        return NOT_SUPPORTED;
    *current = *pending = (unsigned)device->mig;
    return SUCCESS;
}

/* As on an A100, there is room for seven. Instances come and go, so that slots between them are free: every other one. */
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count)
{
    ENTER_DEVICE(nvmlDeviceGetMaxMigDeviceCount)
    *count = device->mig == NOT_TOLD ? 0 : 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance)
{
    ENTER_DEVICE(nvmlDeviceGetMigDeviceHandleByIndex)
    int card = (int)(device - state.devices);
    if (device->mig != 1)
        return NOT_SUPPORTED;
    for (int place = 0, slot = 0; place < state.num_devices; place++)
        if (state.devices[place].parent == card) {
            if (slot == (int)index) {
                *instance = handle_of(place);
                return SUCCESS;
            }
            slot += 2;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **card)
{
    ENTER_DEVICE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)
    if (device->parent < 0)
        return INVALID_ARGUMENT;
    *card = handle_of(device->parent);
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length)
{
    ENTER_DEVICE(nvmlDeviceGetName)
    snprintf(name, length, "%s", device->name);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length)
{
    ENTER_DEVICE(nvmlDeviceGetUUID)
    snprintf(uuid, length, "%s", device->uuid);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *info)
{
    ENTER_DEVICE(nvmlDeviceGetPciInfo_v3)
    memset(info, 0, sizeof *info);
    memcpy(info->bus_id, device->bus, sizeof info->bus_id);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory)
{
    ENTER_DEVICE(nvmlDeviceGetMemoryInfo)
    *memory = (struct memory){device->total, device->free, device->used};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    ENTER_DEVICE(nvmlDeviceGetMemoryInfo_v2)
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->free = device->free;
    memory->used = device->used;
    return SUCCESS;
}

static int list(const struct device *device, int drawing, unsigned *count, struct process_info *infos)
{
    unsigned room = *count;
    if (device->silent[drawing])
        return NOT_SUPPORTED;
    *count = 0;
    for (int i = 0; i < device->num_processes; i++) {
        const struct process *process = &device->processes[i];
        if (process->drawing != drawing)
            continue;
        if (infos != NULL && *count < room)
            infos[*count] = (struct process_info){process->pid, process->used, ~0U, ~0U};
        ++*count;
    }
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#ifdef OLD_DRIVER
#define COMPUTING nvmlDeviceGetComputeRunningProcesses_v2
#define DRAWING nvmlDeviceGetGraphicsRunningProcesses_v2
#define REASONS nvmlDeviceGetCurrentClocksThrottleReasons
#else
#define COMPUTING nvmlDeviceGetComputeRunningProcesses_v3
#define DRAWING nvmlDeviceGetGraphicsRunningProcesses_v3
#define REASONS nvmlDeviceGetCurrentClocksEventReasons
#endif
#define ENTER_RENAMED(call) ENTER_DEVICE(call)

int COMPUTING(void *handle, unsigned *count, struct process_info *infos)
{
    ENTER_RENAMED(COMPUTING)
    return list(device, 0, count, infos);
}

int DRAWING(void *handle, unsigned *count, struct process_info *infos)
{
    ENTER_RENAMED(DRAWING)
    return list(device, 1, count, infos);
}

/* Clocks and heat are a card's: an instance has none. */
static int tell(const struct device *device, u64 figure, unsigned *answer)
{
    if (device->parent >= 0 || figure == NOT_TOLD)
        return NOT_SUPPORTED;
    *answer = (unsigned)figure;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *clock_mhz)
{
    ENTER_DEVICE(nvmlDeviceGetClockInfo)
    return kind == 1 ? tell(device, device->clock, clock_mhz) : INVALID_ARGUMENT; /* 1: the SMs' */
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *temperature_c)
{
    ENTER_DEVICE(nvmlDeviceGetTemperature)
    return sensor == 0 ? tell(device, device->temperature, temperature_c) : INVALID_ARGUMENT; /* 0: the die's */
}

int REASONS(void *handle, u64 *reasons)
{
    ENTER_RENAMED(REASONS)
    if (device->parent >= 0 || device->reasons == NOT_TOLD)
        return NOT_SUPPORTED;
    *reasons = device->reasons;
    return SUCCESS;
}
