{{/* Name of everything: RELEASE-operator, where the release's name says diloco; else RELEASE-diloco-operator. */}}
{{- define "diloco.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if hasSuffix "operator" .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else if contains "diloco" .Release.Name -}}
{{- printf "%s-operator" (.Release.Name | trunc 39 | trimSuffix "-") -}}
{{- else -}}
{{- printf "%s-diloco-operator" (.Release.Name | trunc 32 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "diloco.selectorLabels" -}}
app.kubernetes.io/name: diloco-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "diloco.labels" -}}
{{ include "diloco.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: diloco
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The hooks' pods must not be taken for the operator's. */}}
{{- define "diloco.hookLabels" -}}
app.kubernetes.io/name: diloco-operator-hook
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: diloco
{{- end -}}

{{- define "diloco.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "diloco.fullname" .) -}}
{{- else -}}
{{- required "serviceAccount.name: name the ServiceAccount, or set serviceAccount.create; the namespace's default account would get the operator's rights" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* (list . "worker") */}}
{{- define "diloco.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.images (index . 1) -}}
{{- $registry := $root.Values.images.registry | trimSuffix "/" -}}
{{- if $registry -}}{{- $registry -}}/{{- end -}}
{{- $image.repository -}}:{{- $image.tag | default $root.Chart.AppVersion -}}
{{- end -}}

{{- define "diloco.pullPolicy" -}}
{{- $bare := list -}}
{{- range $role := list "operator" "syncer" "worker" -}}
{{- if not (or $.Values.images.registry (contains "/" (index $.Values.images $role).repository)) -}}
{{- $bare = append $bare $role -}}
{{- end -}}
{{- end -}}
{{- $policy := .Values.images.pullPolicy | default (ternary "Never" "IfNotPresent" (eq (len $bare) 3)) -}}
{{- if and $bare (ne $policy "Never") -}}
{{- fail (printf "with the pull policy %s nodes would pull the image of %s from docker.io, where anyone could own its name: set images.registry to your registry, or set images.pullPolicy=Never if every node has the images already" $policy (join ", " $bare)) -}}
{{- end -}}
{{- $policy -}}
{{- end -}}

{{- define "diloco.podSecurity" -}}
{{- toYaml .Values.podSecurityContext }}
{{- end -}}

{{- define "diloco.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where pods of the chart run. */}}
{{- define "diloco.scheduling" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The operator's rights where its jobs are; operator/diloco_operator/kube/kinds.py says what each is for. */}}
{{- define "diloco.rules" -}}
- apiGroups: [diloco.io]
  resources: [dilocojobs]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [diloco.io]
  resources: [dilocojobs/status]
  verbs: [patch]
- apiGroups: [diloco.io]
  resources: [dilocojobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
{{- end -}}
