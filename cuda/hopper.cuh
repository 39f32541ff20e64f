// Instructions that exact's tiles use on sm_90: barriers in shared memory, int8 wgmma.
#pragma once
#include "common.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace strata_pa {
namespace cuda {

// Matrices in shared memory: rows of 128 bytes, swizzled, eight rows apart by 1024; rows of 32 bytes, swizzled, eight apart by 256. Of their descriptors
// only the lower half says where: place_of_matrix, to which a multiple of 16 bytes may be added as its sixteenth.
__device__ __forceinline__ uint32_t place_of_matrix(uint32_t at) { return at >> 4 | 1u << 16; }
__device__ __forceinline__ uint64_t matrix(uint32_t place) { return place | uint64_t{64} << 32 | uint64_t{1} << 62; }
__device__ __forceinline__ uint64_t narrow_matrix(uint32_t place) { return place | uint64_t{16} << 32 | uint64_t{3} << 62; }

#ifdef __CUDACC__
// As same_in_warp, in a register of the warp. Here, since sm_75 knows no such reduction.
__device__ __forceinline__ int uniform(int x) { return static_cast<int>(__reduce_or_sync(~0u, static_cast<uint32_t>(x))); }
__device__ __forceinline__ void barrier_init(uint32_t at, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
__device__ __forceinline__ void barrier_arrive(uint32_t at) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory"); }
__device__ __forceinline__ void barrier_arrive_if(uint32_t at, int condition) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %1, 0;\n\t@p mbarrier.arrive.shared.b64 _, [%0];\n\t}" ::"r"(at), "r"(condition) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t@done bra end;\n\tbra again;\n\tend:\n\t}" ::"r"(at),
      "r"(parity)
      : "memory");
}
// What was written to shared memory is seen by wgmma.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void join_warpgroup(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// Another meeting point of the block, of `threads`: some wait there, others only say that they have come.
__device__ __forceinline__ void join_threads(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void announce_threads(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// d (+)= 64 cells by 48 columns over 32 dims.
__device__ __forceinline__ void wgmma(int (&d)[24], uint64_t a, uint64_t b, int more) {
  asm volatile(
      "{\n\t.reg .pred more;\n\tsetp.ne.b32 more, %26, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n48k32.s32.s8.s8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
      "}, %24, %25, more;\n\t}"
      :
        "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
        "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23])
      : "l"(a), "l"(b), "r"(more));
}
// d (+)= 64 dims, from registers, by 192 columns of unsigned bytes over 32 cells.
__device__ __forceinline__ void wgmma_rs_s8u8(int (&d)[96], const uint32_t (&a)[4], uint64_t b, int more) {
  asm volatile(
      "{\n\t.reg .pred more;\n\tsetp.ne.b32 more, %101, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n192k32.s32.s8.u8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,"
      "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
      "}, {%96,%97,%98,%99}, %100, more;\n\t}"
      :
        "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
        "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]), "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]),
        "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
        "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]), "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]),
        "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63]), "+r"(d[64]), "+r"(d[65]), "+r"(d[66]), "+r"(d[67]), "+r"(d[68]), "+r"(d[69]), "+r"(d[70]), "+r"(d[71]),
        "+r"(d[72]), "+r"(d[73]), "+r"(d[74]), "+r"(d[75]), "+r"(d[76]), "+r"(d[77]), "+r"(d[78]), "+r"(d[79]), "+r"(d[80]), "+r"(d[81]), "+r"(d[82]), "+r"(d[83]),
        "+r"(d[84]), "+r"(d[85]), "+r"(d[86]), "+r"(d[87]), "+r"(d[88]), "+r"(d[89]), "+r"(d[90]), "+r"(d[91]), "+r"(d[92]), "+r"(d[93]), "+r"(d[94]), "+r"(d[95])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
// wgmma reads `a` until it is waited for: its registers are not another value's before this.
__device__ __forceinline__ void still_read(const uint32_t (&a)[4]) { asm volatile("" ::"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory"); }
// Waits for all but the `newer` last groups of products; wait_for also says whose sums are read then.
template <int newer>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(newer) : "memory");
}
template <int newer, int n>
__device__ __forceinline__ void wait_for(int (&d)[n]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(newer) : "memory");
#pragma unroll
  for (int u = 0; u < n; ++u) asm volatile("" : "+r"(d[u])::"memory");
}

#endif

}  // namespace cuda
}  // namespace strata_pa
#endif
