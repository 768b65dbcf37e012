// The binary interfaces that the probe declares for itself, against NCCL's and NVTX's own headers.
#include <doctest/doctest.h>
#include <nccl.h>
#include <nvtx3/nvToolsExt.h>

#include <type_traits>

#include "probes/nccl_library.h"
#include "probes/nvtx_types.h"

namespace {

// As many parameters, each passed in the same way, and a result of the same size.
template <typename Left, typename Right>
struct Alike : std::false_type {};
template <typename Left, typename Right>
constexpr bool passed_alike =
    sizeof(Left) == sizeof(Right) && std::is_class_v<Left> == std::is_class_v<Right>&& std::is_pointer_v<Left> ==
                                         std::is_pointer_v<Right>;
template <typename LeftResult, typename... Left, typename RightResult, typename... Right>
requires(sizeof...(Left) == sizeof...(Right)) struct Alike<LeftResult (*)(Left...), RightResult (*)(Right...)>
    : std::bool_constant<sizeof(LeftResult) == sizeof(RightResult) && (passed_alike<Left, Right> && ...)> {
};

#define FORKPOINT_CHECK_FUNCTION(name, parameters) \
  static_assert(Alike<decltype(&::nccl##name), decltype(forkpoint::NcclLibrary::name)>::value, #name);
FORKPOINT_NCCL_FUNCTIONS(FORKPOINT_CHECK_FUNCTION)
FORKPOINT_NCCL_QUERIES(FORKPOINT_CHECK_FUNCTION)

static_assert(sizeof(forkpoint::NcclUniqueId) == sizeof(::ncclUniqueId));
static_assert(forkpoint::kNcclSuccess == ncclSuccess && forkpoint::kNcclSystemError == ncclSystemError &&
              forkpoint::kNcclInProgress == ncclInProgress);
static_assert(forkpoint::kNcclBuiltInReductions == ncclNumOps && forkpoint::kNcclNoColor == NCCL_SPLIT_NOCOLOR &&
              forkpoint::kNcclScalarDevice == ncclScalarDevice && forkpoint::kNcclTypeCount == ncclNumTypes);

static_assert(sizeof(forkpoint::NvtxEvent) == sizeof(nvtxEventAttributes_t));
static_assert(offsetof(forkpoint::NvtxEvent, message_type) == offsetof(nvtxEventAttributes_t, messageType));
static_assert(offsetof(forkpoint::NvtxEvent, message) == offsetof(nvtxEventAttributes_t, message));
static_assert(offsetof(forkpoint::NvtxEvent, size) == offsetof(nvtxEventAttributes_t, size));
static_assert(sizeof(forkpoint::NvtxCallbacks) == sizeof(NvtxExportTableCallbacks));
static_assert(sizeof(forkpoint::NvtxVersionInfo) == sizeof(NvtxExportTableVersionInfo));
static_assert(int{forkpoint::kNvtxCore} == int{NVTX_CB_MODULE_CORE} &&
              int{forkpoint::kNvtxDomains} == int{NVTX_CB_MODULE_CORE2});
static_assert(forkpoint::kNvtxMarkEx == unsigned{NVTX_CBID_CORE_MarkEx} &&
              forkpoint::kNvtxMarkA == unsigned{NVTX_CBID_CORE_MarkA} &&
              forkpoint::kNvtxMarkW == unsigned{NVTX_CBID_CORE_MarkW} &&
              forkpoint::kNvtxRangeStartEx == unsigned{NVTX_CBID_CORE_RangeStartEx} &&
              forkpoint::kNvtxRangeStartA == unsigned{NVTX_CBID_CORE_RangeStartA} &&
              forkpoint::kNvtxRangeStartW == unsigned{NVTX_CBID_CORE_RangeStartW} &&
              forkpoint::kNvtxRangePushEx == unsigned{NVTX_CBID_CORE_RangePushEx} &&
              forkpoint::kNvtxRangePushA == unsigned{NVTX_CBID_CORE_RangePushA} &&
              forkpoint::kNvtxRangePushW == unsigned{NVTX_CBID_CORE_RangePushW} &&
              forkpoint::kNvtxRangePop == unsigned{NVTX_CBID_CORE_RangePop});
static_assert(forkpoint::kNvtxDomainMarkEx == unsigned{NVTX_CBID_CORE2_DomainMarkEx} &&
              forkpoint::kNvtxDomainRangeStartEx == unsigned{NVTX_CBID_CORE2_DomainRangeStartEx} &&
              forkpoint::kNvtxDomainRangePushEx == unsigned{NVTX_CBID_CORE2_DomainRangePushEx} &&
              forkpoint::kNvtxDomainRangePop == unsigned{NVTX_CBID_CORE2_DomainRangePop} &&
              forkpoint::kNvtxDomainRegisterStringA == unsigned{NVTX_CBID_CORE2_DomainRegisterStringA} &&
              forkpoint::kNvtxDomainRegisterStringW == unsigned{NVTX_CBID_CORE2_DomainRegisterStringW} &&
              forkpoint::kNvtxDomainCreateA == unsigned{NVTX_CBID_CORE2_DomainCreateA} &&
              forkpoint::kNvtxDomainCreateW == unsigned{NVTX_CBID_CORE2_DomainCreateW});
static_assert(int{forkpoint::kNvtxAscii} == int{NVTX_MESSAGE_TYPE_ASCII} &&
              int{forkpoint::kNvtxWide} == int{NVTX_MESSAGE_TYPE_UNICODE} &&
              int{forkpoint::kNvtxRegistered} == int{NVTX_MESSAGE_TYPE_REGISTERED});
static_assert(forkpoint::kNvtxNoTracking == NVTX_NO_PUSH_POP_TRACKING);
static_assert(forkpoint::kNvtxCallbacks == uint32_t{NVTX_ETID_CALLBACKS} &&
              forkpoint::kNvtxVersionInfo == uint32_t{NVTX_ETID_VERSIONINFO});

}  // namespace

TEST_CASE("NCCL's types are ours of the same size and kind") {
  using forkpoint::DType;
  const std::pair<ncclDataType_t, DType> pairs[] = {
      {ncclInt8, DType::i8},       {ncclUint8, DType::u8},          {ncclInt32, DType::i32},
      {ncclUint32, DType::u32},    {ncclInt64, DType::i64},         {ncclUint64, DType::u64},
      {ncclFloat16, DType::f16},   {ncclFloat32, DType::f32},       {ncclFloat64, DType::f64},
      {ncclBfloat16, DType::bf16}, {ncclFloat8e4m3, DType::f8e4m3}, {ncclFloat8e5m2, DType::f8e5m2}};
  for (const auto& [type, dtype] : pairs) {
    REQUIRE(forkpoint::nccl_dtype(type) != nullptr);
    CHECK(*forkpoint::nccl_dtype(type) == dtype);
  }
  CHECK(forkpoint::nccl_dtype(ncclNumTypes) == nullptr);
  CHECK(forkpoint::nccl_dtype(-1) == nullptr);
}
