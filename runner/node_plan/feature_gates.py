"""The feature gates with which a kubelet does not start: those that are gone, and those that are locked.

A gate is locked when its feature is stable, and some releases later it is removed. Its kubelet then refuses a file that
still names it, so a configuration that was right for years stops the node at an upgrade (``component-base/featuregate``,
``SetFromMap``). The locked gates are those of the list of Kubernetes 1.34 (``versioned_feature_list.yaml``); the gates that are
gone were collected by hand from its releases and are not compared with a list. Any other gate is left to the kubelet.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.node_plan.quirks import KubeletConfigError

POD_LEVEL_MANAGERS = "PodLevelResourceManagers"
POD_LEVEL_MANAGERS_SINCE = 36
"""Minor version since which there is the feature gate :data:`POD_LEVEL_MANAGERS`."""

_ALWAYS_GONE = """
APIListChunking APIPriorityAndFairness APISelfSubjectReview Accelerators AdmissionWebhookMatchConditions AdvancedAuditing
AttachVolumeLimit BlockVolume BoundServiceAccountTokenVolume CPUManager CRIContainerLogRotation CSIBlockVolume
CSIDriverRegistry CSIInlineVolume CSIMigration CSIMigrationAWS CSIMigrationAWSComplete CSIMigrationAzureDisk
CSIMigrationAzureFile CSIMigrationGCE CSIMigrationOpenStack CSIMigrationvSphere CSINodeInfo CSIPersistentVolume
CSIStorageCapacity CSIVolumeFSGroupPolicy ConfigurableFSGroupPolicy CronJobControllerV2 CronJobTimeZone CustomPodDNS
CustomResourceDefaulting CustomResourceValidationExpressions DaemonSetUpdateSurge DefaultPodTopologySpread
DelegateFSGroupToCSIDriver DevicePlugins DisableAcceleratorUsageMetrics DownwardAPIHugePages DryRun DynamicAuditing
DynamicKubeletConfig EndpointSlice EndpointSliceNodeName EndpointSliceProxying EndpointSliceTerminatingCondition
EphemeralContainers EvenPodsSpread ExpandCSIVolumes ExpandInUsePersistentVolumes ExpandPersistentVolumes ExpandedDNSConfig
ExperimentalCriticalPodAnnotation ExperimentalHostUserNamespaceDefaulting ExternalPolicyForExternalIP GCERegionalPersistentDisk
GRPCContainerProbe GenericEphemeralVolume HPAContainerMetrics HugePageStorageMediumSize HugePages IPTablesOwnershipCleanup
IPv6DualStack IdentifyPodOS ImmutableEphemeralVolumes IndexedJob IngressClassNamespacedParams Initializers
JobMutableNodeSchedulingDirectives JobReadyPods JobTrackingWithFinalizers KubeletConfigFile KubeletCredentialProviders
KubeletPluginsWatcher KubeletPodResources KubeletPodResourcesGetAllocatable LegacyNodeRoleBehavior
LegacyServiceAccountTokenNoAutoGeneration LocalStorageCapacityIsolation MinDomainsInPodTopologySpread MixedProtocolLBService
MountContainers MountPropagation NetworkPolicyEndPort NetworkPolicyStatus NodeDisruptionExclusion NodeLease
NodeOutOfServiceVolumeDetach NonPreemptingPriority OpenAPIV3 PVCProtection PersistentLocalVolumes PodAffinityNamespaceSelector
PodDisruptionBudget PodHasNetworkCondition PodOverhead PodPriority PodReadinessGates PodSecurity PodShareProcessNamespace
PreferNominatedNode ProbeTerminationGracePeriod ProxyTerminatingEndpoints RemainingItemCount RequestManagement
ResourceLimitsPriorityFunction ResourceQuotaScopeSelectors RetroactiveDefaultStorageClass RootCAConfigMap RunAsGroup
RuntimeClass SCTPSupport ScheduleDaemonSetPods SeccompDefault SecurityContextDeny SelectorIndex ServerSideApply
ServerSideFieldValidation ServiceAccountIssuerDiscovery ServiceAppProtocol ServiceIPStaticSubrange ServiceInternalTrafficPolicy
ServiceLBNodePortControl ServiceLoadBalancerClass ServiceLoadBalancerFinalizer ServiceNodeExclusion ServiceTopology
SetHostnameAsFQDN StartupProbe StatefulSetMinReadySeconds StorageObjectInUseProtection StreamingProxyRedirects
SupportIPVSProxyMode SupportNodePidsLimit SupportPodPidsLimit SuspendJob Sysctls TTLAfterFinished TaintBasedEvictions
TaintNodesByCondition TokenRequest TokenRequestProjection TopologyManager UserNamespacesStatelessPodsSupport
ValidateProxyRedirects VolumePVCDataSource VolumeScheduling VolumeSnapshotDataSource VolumeSubpath VolumeSubpathEnvExpansion
WarningHeaders WatchBookmark WindowsEndpointSliceProxying WindowsGMSA WindowsHostProcessContainers WindowsRunAsUserName
"""
"""Gates that no kubelet since 1.33 has."""
_GONE_SINCE: Mapping[str, int] = dict.fromkeys(_ALWAYS_GONE.split(), 0) | {"MemoryManager": 35}
"""Gate → first minor version without it."""

_LOCKED_SINCE: Mapping[str, int] = {
    "AnyVolumeDataSource": 33,
    "CPUManagerPolicyOptions": 33,
    "ComponentSLIs": 32,
    "ConsistentListFromCache": 34,
    "DevicePluginCDIDevices": 31,
    "HonorPVReclaimPolicy": 33,
    "JobBackoffLimitPerIndex": 33,
    "JobPodReplacementPolicy": 34,
    "JobSuccessPolicy": 33,
    "KubeletTracing": 34,
    "LoadBalancerIPMode": 32,
    "LogarithmicScaleDown": 31,
    "MatchLabelKeysInPodAffinity": 33,
    "MemoryManager": 32,
    "NFTablesProxyMode": 33,
    "NodeInclusionPolicyInPodTopologySpread": 33,
    "NodeSwap": 34,
    "PodSchedulingReadiness": 30,
    "RecoverVolumeExpansionFailure": 34,
    "RecursiveReadOnlyMounts": 33,
    "RelaxedDNSSearchValidation": 34,
    "RelaxedEnvironmentVariableValidation": 34,
    "SchedulerQueueingHints": 34,
    "SeparateTaintEvictionController": 34,
    "ServiceAccountTokenJTI": 32,
    "ServiceAccountTokenNodeBinding": 33,
    "ServiceAccountTokenNodeBindingValidation": 32,
    "ServiceAccountTokenPodNodeInfo": 32,
    "ServiceTrafficDistribution": 33,
    "SidecarContainers": 33,
    "SizeMemoryBackedVolumes": 32,
    "StatefulSetAutoDeletePVC": 32,
    "TopologyAwareHints": 33,
}
"""Gate → minor version since which it is locked to true."""


def check_gates(gates: Mapping[str, bool], minor: int) -> None:
    """Check the ``featureGates`` of a kubelet 1.*minor*; :class:`KubeletConfigError` in its words if it would not start.

    Of several wrong gates the kubelet names any one (the order of a Go map), this the first by name.
    """
    for gate, enabled in sorted(gates.items()):
        reason = ""
        if minor >= _GONE_SINCE.get(gate, minor + 1) or (
            gate == POD_LEVEL_MANAGERS and minor < POD_LEVEL_MANAGERS_SINCE
        ):
            reason = f"unrecognized feature gate: {gate}"
        elif not enabled and minor >= _LOCKED_SINCE.get(gate, minor + 1):
            reason = f"cannot set feature gate {gate} to false, feature is locked to true"
        elif gate == POD_LEVEL_MANAGERS and enabled and not gates.get("PodLevelResources", True):
            reason = f"{gate} is enabled, but depends on features that are disabled: [PodLevelResources]"
        if reason:
            raise KubeletConfigError(f"failed to set feature gates from initial flags-based config: {reason}")
